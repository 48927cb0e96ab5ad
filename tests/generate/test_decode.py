"""spec_decode: the same tokens at any draft depth and quality, greedy and sampled, and clean ends."""

from types import SimpleNamespace

import pytest

from forward.kv_cache import make_kv_cache
from generate.decode import DecodeCounters, spec_decode
from generate.draft import NoDraft
from generate.sampler import Sampler
from generate.tools.tool_state import Tool, ToolState
from tests.conftest import FIXTURES, reference

NAME = "glm_moe_dsa"
SAMPLERS = {"greedy": Sampler(), "sampled": Sampler(temperature=1.5, nucleus=0.95, seed=11)}


@pytest.fixture
def model(load):
    return load(FIXTURES / NAME, cap=2).model


class Script(NoDraft):
    """A drafter that knows the continuation; every `wrong_every`-th draft token is wrong."""

    def __init__(self, known, depth, wrong_every=0):
        self.known, self.depth, self.wrong_every, self.count = known, depth, wrong_every, 0

    def propose(self, sequences, prompt_chunks=()):
        [sequence] = sequences
        start = len(sequence.ids)
        out = []
        for draft in self.known[start : start + min(self.depth, sequence.num_left - 1)]:
            self.count += 1
            is_wrong = self.wrong_every and self.count % self.wrong_every == 0
            out.append((draft + 1) % 512 if is_wrong else draft)
        return [out]


def generate(model, prompt, sampler, num_tokens, **options):
    kv, counters = make_kv_cache(model.config, len(prompt) + num_tokens), DecodeCounters()
    ids = list(spec_decode(model, kv, prompt, sampler, num_tokens, counters=counters, **options))
    return ids, kv, counters


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("depth", [1, 3, 8])
@pytest.mark.parametrize("wrong_every", [0, 1, 3], ids=["right", "wrong", "mixed"])
def test_drafts_change_the_number_of_forwards_and_nothing_else(model, sampler, depth, wrong_every):
    prompt = reference(NAME)[0]["greedy"]["prompt"]
    plain, plain_kv, _ = generate(model, prompt, sampler, 20)
    draft = Script(prompt + plain, depth, wrong_every)
    drafted, kv, counters = generate(model, prompt, sampler, 20, drafter=draft)
    assert drafted == plain and kv.length == plain_kv.length == len(prompt) + 19
    if wrong_every == 0:
        assert counters.accepted == counters.proposed > 0 and counters.forwards < 19
        assert counters.tokens_per_forward == pytest.approx(19 / counters.forwards)
    if wrong_every == 1:
        assert counters.accepted == 0 and counters.forwards == 19
    # what follows depends on the KV cache that the drafts left behind: trim and continue
    more = list(spec_decode(model, kv.clone(60), prompt + drafted, sampler, 8))
    expected = list(spec_decode(model, plain_kv.clone(60), prompt + plain, sampler, 8))
    assert more == expected


def test_sampling_depends_on_the_seed_and_the_row(model):
    prompt = [5, 6, 7]
    texts = [
        generate(model, prompt, Sampler(1.5, 0.95, seed, row), 12)[0] for seed, row in [(1, 0), (1, 0), (2, 0), (1, 1)]
    ]
    assert texts[0] == texts[1] and texts[0] != texts[2] and texts[0] != texts[3]


def test_a_stop_token_ends_it_and_is_not_yielded(model):
    ref = reference(NAME)[0]["greedy"]
    stop = ref["continuation"][6]
    first = ref["continuation"].index(stop)
    ids, kv, counters = generate(model, ref["prompt"], Sampler(), 24, stop_ids={stop})
    assert ids == ref["continuation"][:first] and counters.stop_id == stop
    assert kv.length == len(ref["prompt"]) + first
    # a drafted stop token too, and one that only the draft wants does not
    draft = Script(ref["prompt"] + ref["continuation"], 4)
    assert generate(model, ref["prompt"], Sampler(), 24, stop_ids={stop}, drafter=draft)[0] == ids
    wrong = Script(ref["prompt"] + ref["continuation"], 4, wrong_every=2)
    unwanted = next(i for i in range(512) if i not in ref["continuation"])
    wrong.propose = lambda sequences, _=(): [[unwanted] * (sequences[0].num_left - 1)]
    drafted = generate(model, ref["prompt"], Sampler(), 24, stop_ids={unwanted}, drafter=wrong)[0]
    assert drafted == ref["continuation"]


def test_a_cached_prefix_is_not_prefilled_again(model):
    ref = reference(NAME)[0]["greedy"]
    _, kv, _ = generate(model, ref["prompt"], Sampler(), 24)
    kv.trim(7)
    rows = []
    out = list(
        spec_decode(model, kv, ref["prompt"], Sampler(), 24, progress=lambda layer, num_layers, n: rows.append(n))
    )
    assert out == ref["continuation"] and not rows  # five rows are no prefill worth reporting


def test_closing_the_generator_leaves_no_draft_token_behind(model):
    ref = reference(NAME)[0]["greedy"]
    kv = make_kv_cache(model.config, 60)
    draft = Script(ref["prompt"] + ref["continuation"], 8)
    generation = spec_decode(model, kv, ref["prompt"], Sampler(), 24, drafter=draft)
    taken = [next(generation) for _ in range(4)]
    generation.close()
    assert kv.length == 12 + 4
    rest = list(spec_decode(model, kv.clone(), ref["prompt"] + taken + ref["continuation"][4:5], Sampler(), 19))
    assert taken + ref["continuation"][4:5] + rest == ref["continuation"]


def test_the_room_is_checked_first_and_used_to_the_last_position(model):
    ref = reference(NAME)[0]["greedy"]
    kv = make_kv_cache(model.config, 12 + 23)  # the last token needs no position
    assert list(spec_decode(model, kv, ref["prompt"], Sampler(), 24)) == ref["continuation"]
    with pytest.raises(ValueError, match="do not fit"):
        next(spec_decode(model, make_kv_cache(model.config, 34), ref["prompt"], Sampler(), 24))
    with pytest.raises(ValueError, match="at least one prompt id"):
        next(spec_decode(model, make_kv_cache(model.config, 34), [], Sampler(), 2))


def test_counters_may_run_over_several_generations(model):
    counters = DecodeCounters()
    for _ in range(2):
        kv = make_kv_cache(model.config, 40)
        assert len(list(spec_decode(model, kv, [1, 2], Sampler(), 5, counters=counters))) == 5
    assert counters.tokens == 10


def test_nothing_runs_before_the_first_next(model):
    kv = make_kv_cache(model.config, 40)
    spec_decode(model, kv, [1, 2], Sampler(), 5)
    assert kv.length == 0
    assert list(spec_decode(model, kv, [1, 2], Sampler(), 0)) == []


@pytest.mark.parametrize("depth", [0, 3])
def test_forced_tokens_of_a_tool_follow_the_call_and_count_as_tokens(model, depth):
    """The end of a block is sampled, the result is forced; the texts are the same with draft tokens."""
    prompt = reference(NAME)[0]["greedy"]["prompt"]
    plain, _, _ = generate(model, prompt, Sampler(), 8)
    tokenizer = SimpleNamespace(encode=lambda text: [7, 8], decode=lambda ids: str(ids))
    tool = Tool(plain[1], plain[3], 500, 501, lambda text: text)
    assert plain[1] not in plain[2:4] and plain[3] != plain[2]
    state = ToolState(prompt, (tool,), tokenizer)
    draft = Script(prompt + plain[:4] + [500, 7, 8, 501], depth)
    ids, kv, counters = generate(model, prompt, Sampler(), 12, drafter=draft, tool_state=state)
    assert ids[:8] == [*plain[:4], 500, 7, 8, 501] and len(ids) == counters.tokens == 12
    assert state.ids == prompt + ids and state.masks == [1] * 4 + [0] * 4 + [1] * 4
    assert kv.length == len(prompt) + 11
    again = make_kv_cache(model.config, len(prompt) + 12)
    assert list(spec_decode(model, again, prompt + ids[:8], Sampler(), 4)) == ids[8:]
