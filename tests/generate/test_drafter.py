"""Drafter and its proposers: n-grams, MTP drafts of several sequences, clones."""

import random

import pytest
import torch

from forward.kv_cache import make_kv_cache
from forward.step import step_all
from generate.batch import Batch
from generate.draft import Drafter
from generate.draft_length import DraftLength
from generate.proposers import MtpProposer, NgramProposer, Proposers, draft_by_mtp
from generate.sampler import Sampler
from generate.sequence import Prefill, Sequence
from settings import EMBEDDED_SNAPSHOT
from tests.conftest import FIXTURES, read_json, reference

NAME = "glm_moe_dsa_mtp"
PROMPT = reference(NAME)[0]["greedy"]["prompt"]
TINY = read_json(EMBEDDED_SNAPSHOT / "ref_glm.json")


@pytest.fixture
def model(load):
    return load(FIXTURES / NAME, DRAFT="auto", cap=3).model


def test_ngrams_use_the_longest_then_the_latest_match():
    source = NgramProposer()
    text = [1, 2, 3, 4, 9, 8, 3, 4, 7, 7, 3, 4]
    assert source.propose(text, 3) == ("n-gram", [7, 7, 3])
    assert source.propose([*text, 9, 8, 3, 4], 2) == ("long n-gram", [7, 7])
    assert NgramProposer().propose([5, 6, 7], 4) == ("n-gram", [])
    assert NgramProposer().propose([5], 4) == ("n-gram", [])
    assert NgramProposer().propose([5, 5, 5, 5, 5], 2)[1] == [5]  # only the tokens that followed


def test_an_index_that_grows_equals_a_new_one():
    generator, proposer, text = random.Random(1), NgramProposer(), []
    for _ in range(300):
        text.append(generator.randrange(4))
        assert proposer.propose(text, 5) == NgramProposer().propose(text, 5)


def test_mtp_drafts_of_several_sequences_are_those_of_each_alone(load):
    """At different depths, one of them a few tokens behind; the KV cache is as before."""
    model = load(EMBEDDED_SNAPSHOT, DRAFT="auto").model
    text, rows = TINY["full_ids"], []
    for length in (20, 33, 47):
        kv = make_kv_cache(model.config, 100)
        proposers, batch = Proposers(model, kv), Batch(model, Drafter(model, DraftLength("3")))
        batch.prefill(Prefill(text[: length - 5], kv, proposers))
        batch.prefill(Prefill(text[:length], kv, proposers))
        rows.append((proposers.mtp, text[: length + 1], 1 + length % 5))
    alone = []
    for source, ids, depth in rows:
        alone += draft_by_mtp(model, [(source.clone(source.kv.clone()), ids, depth)])
    assert [len(draft) for draft in alone] == [1, 4, 3]
    requested, plain = [], model.experts.request
    model.experts.request = lambda layer, *more: requested.append(layer) or plain(layer, *more)
    assert draft_by_mtp(model, rows) == alone
    assert requested == [model.config.num_layers] * 4  # once for all sequences
    for source, _, _ in rows:
        assert source.kv.mtp_base + source.kv.mtp_length == source.kv.length == source.first


def test_a_clone_drafts_as_its_original(model):
    kv = make_kv_cache(model.config, 40)
    drafter, proposers = Drafter(model, DraftLength("4")), Proposers(model, kv)
    Batch(model, drafter).prefill(Prefill(PROMPT, kv, proposers))
    proposers.ngrams.index(PROMPT)
    states = [kv.clone(), kv.clone()]
    both = [proposers.clone(state) for state in states]

    def sequence(last, kv, proposers, most):
        return Sequence([*PROMPT, last], kv, Sampler(), most + 1, proposers=proposers)

    rows = [sequence(7, states[0], both[0], 4), sequence(9, states[1], both[1], 2)]
    assert drafter.propose(rows)[0] == drafter.propose([sequence(7, kv, proposers, 4)])[0]
    assert both[0].ngrams.places is not both[1].ngrams.places
    assert isinstance(both[1].mtp, MtpProposer) and both[1].mtp.kv is states[1]


@pytest.mark.parametrize("chunk", [4, 1024])
def test_logits_of_the_last_tokens_alone(load, chunk):
    model = load(FIXTURES / NAME, PREFILL_CHUNK=chunk).model
    a, b = (make_kv_cache(model.config, 30) for _ in range(2))
    others = [state.clone() for state in (a, b)]
    whole = step_all(model, [(PROMPT, a), (PROMPT[:5], b)])
    rows = [(PROMPT[:-5], PROMPT[-5:], others[0]), (PROMPT[:4], PROMPT[4:5], others[1])]
    sequences = [Sequence(ids, kv, Sampler(), 20) for ids, _, kv in rows]
    some = torch.cat(Batch(model).forward(sequences, [drafts for _, drafts, _ in rows]))
    n = len(PROMPT)
    assert torch.equal(some, torch.cat([whole[n - 6 : n], whole[n + 3 :]]))
