"""Draft tokens: the MTP layer against transformers, n-grams; none of them changes a token or the KV cache."""

from collections import Counter

import pytest
import torch

from experts.route_observer import ForwardRoutes
from forward.kv_cache import make_kv_cache
from forward.layers_forward import layers_forward
from forward.mtp import mtp, mtp_logits
from forward.step import step
from generate.decode import DecodeCounters, spec_decode
from generate.draft import Drafter, NoDraft
from generate.draft_length import DraftLength
from generate.proposers import MtpProposer, Proposers, draft_by_mtp
from generate.sampler import Sampler
from kernels.dispatch import rms_norm
from settings import EMBEDDED_SNAPSHOT
from tests.conftest import FIXTURES, read_json, reference

NAME = "glm_moe_dsa_mtp"
REF, TENSORS = reference(NAME)
TINY = read_json(EMBEDDED_SNAPSHOT / "ref_glm.json")
SAMPLERS = {"greedy": Sampler(), "sampled": Sampler(temperature=1.2, nucleus=0.95, seed=5)}


@pytest.fixture(params=["native", "reference"])
def model(load, request):
    return load(FIXTURES / NAME, DRAFT="auto", KERNELS=request.param).model


def hidden_rows(model, kv, ids):
    """Hidden rows at each position, behind the final norm."""
    with torch.inference_mode():
        chunks = [hidden for _, hidden in layers_forward(model, [(ids, kv)])]
        return rms_norm(torch.cat(chunks), model.weights.norm, model.config.rms_norm_eps)


def generate(model, prompt, num_tokens, sampler=None, draft="auto", **options):
    kv, counters = make_kv_cache(model.config, len(prompt) + num_tokens), DecodeCounters()
    drafter = draft(model) if callable(draft) else Drafter(model, DraftLength(draft))
    ids = list(spec_decode(model, kv, prompt, sampler or Sampler(), num_tokens, (), drafter, None, counters, **options))
    return ids, kv, counters


# --- the layer --------------------------------------------------------------------------------------------------------


def test_logits_equal_transformers(model):
    kv = make_kv_cache(model.config, 60)
    hidden = hidden_rows(model, kv, REF["seq"])
    s = mtp(model, [(REF["seq"][1:], kv)], hidden[:-1])
    torch.testing.assert_close(mtp_logits(model, s), TENSORS["mtp_logits"], atol=1e-3, rtol=0)
    assert mtp_logits(model, s).argmax(-1).tolist() == REF["mtp"]["argmax"]
    assert kv.mtp_length == 47 and kv.length == 48


@pytest.mark.parametrize("cuts", [[47], [1] * 47, [12, 1, 2, 20, 12]])
def test_chunks_do_not_change_the_layer(load, cuts):
    model = load(FIXTURES / NAME, DRAFT="auto").model
    kv, at, rows = make_kv_cache(model.config, 60), 0, []
    hidden = hidden_rows(model, kv, REF["seq"])
    for cut in cuts:
        rows.append(mtp(model, [(REF["seq"][at + 1 : at + cut + 1], kv)], hidden[at : at + cut]))
        at += cut
    whole = make_kv_cache(model.config, 60)
    whole.length = 48
    assert torch.equal(torch.cat(rows), mtp(model, [(REF["seq"][1:], whole)], hidden[:-1]))


def test_chained_drafts_equal_transformers(model):
    """`draft` of MTP position i: what follows seq[i + 1], each draft token fed back."""
    for slot, expected in REF["mtp"]["chained_drafts"].items():
        known = int(slot) + 1  # positions whose next token is known
        kv = make_kv_cache(model.config, 60)
        source = MtpProposer(model, kv)
        for chunk, hidden in layers_forward_of(model, REF["seq"][:known], kv):
            source.observe(chunk, *chunk.segments, hidden)
        ids = REF["seq"][: known + 1]
        assert draft_by_mtp(model, [(source, ids, len(expected["draft"]))]) == [expected["draft"]]


def layers_forward_of(model, ids, kv):
    """-> (chunk, hidden behind the final norm) of each chunk."""
    with torch.inference_mode():
        for chunk, hidden in layers_forward(model, [(ids, kv)]):
            yield chunk, rms_norm(hidden, model.weights.norm, model.config.rms_norm_eps)


def test_kv_capacity_is_checked(load):
    model = load(FIXTURES / NAME, DRAFT="auto").model
    kv = make_kv_cache(model.config, 8)
    with pytest.raises(ValueError, match="9 more MTP positions do not fit: 0 of 8"):
        mtp(model, [([1] * 9, kv)], torch.zeros(9, model.config.hidden_size))


def test_mtp_positions_follow_trim_and_clone(load):
    model = load(FIXTURES / NAME, DRAFT="auto").model
    kv = make_kv_cache(model.config, 60)
    hidden = hidden_rows(model, kv, REF["seq"])
    mtp(model, [(REF["seq"][1:], kv)], hidden[:-1])
    other = kv.clone()
    kv.trim(20)
    assert kv.mtp_length == 19 and other.mtp_length == 47  # position 19 needs token 20, which may have changed
    rest = mtp(model, [(REF["seq"][20:], kv)], hidden[19:-1])
    other.mtp_length = 19
    assert torch.equal(mtp(model, [(REF["seq"][20:], other)], hidden[19:-1]), rest)


# --- drafts change nothing --------------------------------------------------------------------------------------------


class WrongDrafter(Drafter):
    """A drafter with wrong draft tokens: all of them, or every third."""

    every = 1

    def propose(self, sequences, prompt_chunks=()):
        [draft] = super().propose(sequences, prompt_chunks)
        return [[(g + 1) % 512 if i % self.every == self.every - 1 else g for i, g in enumerate(draft)]]


class MixedDrafter(WrongDrafter):
    every = 3


class CorrectDrafter(NoDraft):
    """Drafts the known continuation."""

    def __init__(self, known, depth):
        self.known, self.depth = known, depth

    def propose(self, sequences, prompt_chunks=()):
        [sequence] = sequences
        start = len(sequence.ids)
        return [self.known[start : start + min(self.depth, sequence.num_left - 1)]]


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize(
    ("kernels", "depth"), [*(("native", d) for d in ("auto", "1", "3", "8")), ("reference", "3"), ("reference", "8")]
)
def test_the_same_ids_and_the_same_kv(load, kernels, sampler, depth):
    model = load(FIXTURES / NAME, DRAFT="auto", KERNELS=kernels).model
    prompt = REF["greedy"]["prompt"]
    plain, plain_kv, _ = generate(model, prompt, 24, sampler, lambda model: NoDraft())
    if sampler is SAMPLERS["greedy"]:
        assert plain == REF["greedy"]["continuation"]
    n, most = plain_kv.length, 8 if depth == "auto" else int(depth)
    drafters = {
        "own": lambda model: Drafter(model, DraftLength(depth)),
        "wrong": lambda model: WrongDrafter(model, DraftLength(depth)),
        "mixed": lambda model: MixedDrafter(model, DraftLength(depth)),
        "right": lambda model: CorrectDrafter(prompt + plain, most),
    }
    for name, drafter in drafters.items():
        ids, kv, counters = generate(model, prompt, 24, sampler, drafter)
        assert ids == plain and kv.length == n, name
        last = model.config.num_layers
        for mine, expected in ((kv.latents, plain_kv.latents), (kv.rope_keys, plain_kv.rope_keys)):
            torch.testing.assert_close(mine[:last, :n], expected[:last, :n], atol=1e-4, rtol=0)
        if name == "right":
            assert counters.accepted == counters.proposed and counters.forwards < 23
        if name == "wrong" and depth != "auto":
            assert counters.accepted == 0 < counters.proposed


def test_native_kernels_leave_the_same_bits(load):
    model = load(FIXTURES / NAME, DRAFT="auto", cap=2).model
    _, plain_kv, _ = generate(model, REF["greedy"]["prompt"], 24, draft=lambda model: NoDraft())
    _, kv, counters = generate(model, REF["greedy"]["prompt"], 24, draft="3")
    assert counters.proposed > counters.accepted
    n, last = kv.length, model.config.num_layers
    assert torch.equal(kv.latents[:last, :n], plain_kv.latents[:last, :n])
    assert torch.equal(kv.index_keys[:-1, :n], plain_kv.index_keys[:-1, :n])


def test_the_trained_mtp_layer_drafts_well(load):
    """At least 1.5 tokens a forward, greedy, on the embedded model."""
    model = load(EMBEDDED_SNAPSHOT, DRAFT="auto").model
    ids, _, counters = generate(model, TINY["prompt_ids"], len(TINY["full_ids"]) - len(TINY["prompt_ids"]), draft="3")
    assert TINY["prompt_ids"] + ids == TINY["full_ids"]
    assert counters.tokens_per_forward > 1.5


@pytest.mark.parametrize("chunk", [5, 40])
def test_a_long_prompt_goes_through_the_layer_chunk_by_chunk(load, chunk):
    """The layer's KV cache of a prompt is the same in one chunk, in several, or row by row."""
    model = load(EMBEDDED_SNAPSHOT, DRAFT="auto", PREFILL_CHUNK=chunk).model
    prompt, states = TINY["full_ids"], []
    for few in (16, 10**9):
        kv = make_kv_cache(model.config, 100)
        source = MtpProposer(model, kv)
        source.FEW = few
        for piece, hidden in layers_forward_of(model, prompt[:-1], kv):
            source.observe(piece, *piece.segments, hidden)
        assert source.first + len(source.hidden) == len(prompt) - 1
        states.append((kv, *draft_by_mtp(model, [(source, prompt, 4)])))
    (one, draft), (other, other_draft) = states
    layer, n = model.config.num_layers, len(prompt) - 1
    assert draft == other_draft and one.mtp_length == other.mtp_length == n
    assert torch.equal(one.latents[layer, :n], other.latents[layer, :n])


def test_drafts_after_a_cached_prefix(load):
    """Its hidden rows were not kept: the MTP layer starts with the first new one."""
    model = load(EMBEDDED_SNAPSHOT, DRAFT="auto").model
    prompt, n = TINY["prompt_ids"], 40
    kv = make_kv_cache(model.config, 100)
    first = list(spec_decode(model, kv, prompt, Sampler(), 8))
    again = Drafter(model, DraftLength("3"))
    counters = DecodeCounters()
    rest = list(spec_decode(model, kv, prompt + first, Sampler(), n, (), again, None, counters))
    assert (prompt + first + rest) == TINY["full_ids"][: len(prompt) + 8 + n]
    assert kv.mtp_base == len(prompt) + 7 and counters.accepted > 0


def test_a_closed_generation_can_be_continued(load):
    model = load(EMBEDDED_SNAPSHOT, DRAFT="auto").model
    prompt = TINY["prompt_ids"]
    kv = make_kv_cache(model.config, 100)
    drafter, proposers = Drafter(model, DraftLength("8")), Proposers(model, kv)
    generation = spec_decode(model, kv, prompt, Sampler(), 40, (), drafter, proposers=proposers)
    taken = [next(generation) for _ in range(6)]
    generation.close()
    rest = list(spec_decode(model, kv, prompt + taken, Sampler(), 30, (), drafter, proposers=proposers))
    assert prompt + taken + rest == TINY["full_ids"][: len(prompt) + 36]


@pytest.mark.slow
def test_draft_tokens_do_not_change_the_distribution(load):
    """Chi-square over many seeds: the second token, drafted or not, has the probabilities that the logits give it."""
    model = load(FIXTURES / NAME, DRAFT="auto").model
    prompt, num_seeds = REF["greedy"]["prompt"], 400
    kv = make_kv_cache(model.config, 20)
    step(model, [(prompt[:-1], kv)])
    first = REF["greedy"]["continuation"][0]
    p = Sampler(temperature=1.0).probabilities(step(model, [([prompt[-1], first], kv.clone())])[0])
    likeliest = p.argsort(descending=True)[:8].tolist()

    class Likeliest(NoDraft):
        """Drafts the likeliest second token."""

        def propose(self, sequences, prompt_chunks=()):
            [sequence] = sequences
            return [likeliest[:1] if len(sequence.ids) == len(prompt) + 1 and sequence.num_left > 1 else []]

    class Forced(Sampler):
        """The first token is given, so that all seeds sample the second from the same probabilities."""

        def sample(self, logits, position):
            return first if position == len(prompt) else super().sample(logits, position)

    counts, accepted = Counter(), DecodeCounters()
    for seed in range(num_seeds):
        sampler = Forced(temperature=1.0, seed=seed)
        out = list(spec_decode(model, kv.clone(), prompt, sampler, 3, (), Likeliest(), None, accepted))
        counts[out[1]] += 1
    assert accepted.proposed == num_seeds and accepted.accepted == counts[likeliest[0]]
    expected = [float(p[i]) * num_seeds for i in likeliest]
    observed = [counts[i] for i in likeliest]
    expected.append(num_seeds - sum(expected))
    observed.append(num_seeds - sum(observed))
    chi = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    assert chi < 26.1  # 8 degrees of freedom: one in a thousand is above


@pytest.mark.parametrize("wrong", [True, False])
def test_only_accepted_tokens_count_as_expert_uses(load, wrong):
    """Experts of rejected draft tokens do not count as used."""
    model = load(EMBEDDED_SNAPSHOT, DRAFT="auto").model
    prompt, num_layers = TINY["prompt_ids"], len(model.config.sparse_layers)
    known = TINY["full_ids"]

    class KnownText(Drafter):
        def propose(self, sequences, prompt_chunks=()):
            [sequence] = sequences
            self.draft_length.most = 0
            super().propose(sequences, prompt_chunks)
            start = len(sequence.ids)
            draft = known[start : start + min(3, sequence.num_left - 1)]
            self.turns, self.drafting = [("MTP", len(draft), 1)], {"MTP": 0.0}
            self.routes = ForwardRoutes() if draft else None
            return [[(token + wrong) % 300 for token in draft]]

    kv, counters = make_kv_cache(model.config, 100), DecodeCounters()
    draft = KnownText(model, DraftLength("3"))
    list(spec_decode(model, kv, prompt, Sampler(), 40, (), draft, None, counters))
    assert (counters.accepted == 0) == wrong and draft.routes is None
    uses = sum(total for (layer, _), total in model.experts.use_counts().items() if layer < model.config.num_layers)
    # 46 tokens of the text went through, each with 4 experts a layer, less the decay with a half-life of 512 tokens.
    per_token = uses / num_layers / 4
    assert 0.75 * 46 < per_token <= 46
