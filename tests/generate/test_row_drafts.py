"""Draft tokens of several sequences at once: the same steps and KV cache with any; only accepted ones count as uses."""

import pytest
import torch

import generate.engine
from experts.route_observer import ForwardRoutes
from forward.kv_cache import make_kv_cache
from generate.batch import Batch
from generate.draft import Drafter, align_choices
from generate.draft_length import DraftLength
from generate.engine import Engine
from generate.sampler import Sampler
from generate.sequence import Sequence
from generate.tools.tool_state import Tool
from settings import EMBEDDED_SNAPSHOT
from tests.conftest import FIXTURES, read_json, reference

NAME = "glm_moe_dsa_mtp"
PROMPT = reference(NAME)[0]["greedy"]["prompt"]
TINY = read_json(EMBEDDED_SNAPSHOT / "ref_glm.json")
VOCAB = 512
HOW = {"greedy": dict(temperature=0), "sampled": dict(temperature=1.5, seed=3), "top_k": dict(top_k=3, seed=4)}


@pytest.fixture
def model(load):
    return load(FIXTURES / NAME, DRAFT="auto", cap=3).model


class DecimalTokenizer:
    """A tokenizer: a text is its ids in decimal."""

    def encode(self, text):
        return [int(word) for word in text.split()]

    def decode(self, ids):
        return " ".join(map(str, ids))


class ScriptedDrafter(Drafter):
    """Draft tokens of the known texts of all sequences; where `is_wrong(row, position)`, another id."""

    texts, depth = (), 3

    def is_wrong(self, row, position):
        return False

    def propose(self, sequences, prompt_chunks=()):
        most, self.draft_length.most = self.draft_length.most, 0
        super().propose(sequences, prompt_chunks)
        self.draft_length.most, drafts = most, []
        for sequence in sequences:
            row, start = sequence.sampler.row, len(sequence.ids)
            stop = min(start + min(self.depth, sequence.num_left - 1), len(self.texts[row]))
            drafts.append([self.texts[row][at] ^ self.is_wrong(row, at) for at in range(start, stop)])
        self.turns = [("MTP", len(draft), num_new) for draft, (_, _, num_new) in zip(drafts, self.turns, strict=True)]
        self.drafting = {"MTP": 0.0}
        self.routes = ForwardRoutes() if any(drafts) else None
        return drafts


class WrongScript(ScriptedDrafter):
    def is_wrong(self, row, position):
        return True


class MixedScript(ScriptedDrafter):
    """Every third draft token of a sequence is wrong; another third for each sequence."""

    def is_wrong(self, row, position):
        return (row + position) % 3 == 0


class RecordedEngine:
    """An Engine, its forwards [(tokens of each sequence), ...] and the KV caches of all sequences."""

    def __init__(self, model, monkeypatch, drafter=Drafter, **options):
        self.engine, self.forwards, self.states = Engine(model, DecimalTokenizer(), **options), [], []
        recorded_engine, clone = self, self.engine.clone

        class Recording(Batch):
            def run_layers(self, scheduled, *more):
                recorded_engine.forwards.append([len(ids) for _, ids, _ in scheduled])
                return super().run_layers(scheduled, *more)

        def recorded(*arguments):
            for kv, proposers in clone(*arguments):
                self.states.append(kv)
                yield kv, proposers

        monkeypatch.setattr(generate.engine, "Drafter", drafter or Drafter)
        monkeypatch.setattr(generate.engine, "Batch", Recording)
        self.engine.clone, self.steps = recorded, None

    def run(self, **options):
        self.steps = list(self.engine.generate(PROMPT, **options))
        return self

    def row(self, number):
        """The ids of a sequence, and its masks."""
        return [ids[number] for ids, _ in self.steps], [masks[number] for _, masks in self.steps]


def texts_of(recorded_engine, num_rows):
    return [PROMPT + recorded_engine.row(row)[0] for row in range(num_rows)]


def scripted(kind, texts, depth=3):
    return type(kind.__name__, (kind,), {"texts": texts, "depth": depth})


def check_kv(model, mine, expected):
    """The positions that both hold are equal, except those of the MTP layer."""
    last = model.config.num_layers
    for a, b in zip(mine, expected, strict=True):
        n = min(a.length, b.length)
        assert torch.equal(a.latents[:last, :n], b.latents[:last, :n])
        assert torch.equal(a.rope_keys[:last, :n], b.rope_keys[:last, :n])


# --- the same steps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_the_same_steps_and_the_same_kv_at_any_depth(model, monkeypatch, how):
    options = dict(num_samples=3, max_tokens=14, **how)
    plain = RecordedEngine(model, monkeypatch, terminal_ids=()).run(**options)
    assert plain.forwards == [[len(PROMPT)]] + [[1, 1, 1]] * 13
    texts = texts_of(plain, 3)
    for depth in (1, 3, 8, "auto"):
        recorded_engine = RecordedEngine(model, monkeypatch, terminal_ids=(), draft=depth).run(**options)
        assert recorded_engine.steps == plain.steps, depth
        check_kv(model, recorded_engine.states, plain.states)
        assert recorded_engine.engine.draft_length.tried  # drafts were made
    for kind in (ScriptedDrafter, WrongScript, MixedScript):
        for depth in (1, 8):
            drafter = scripted(kind, texts, depth)
            recorded_engine = RecordedEngine(model, monkeypatch, drafter, terminal_ids=(), draft=depth).run(**options)
            assert recorded_engine.steps == plain.steps, (kind, depth)
            assert [state.length for state in recorded_engine.states] == [len(PROMPT) + 13] * 3
            check_kv(model, recorded_engine.states, plain.states)
            right = sum(recorded_engine.engine.draft_length.accepted.values())
            if kind is ScriptedDrafter:
                expected = {1: [[2, 2, 2]] * 6 + [[1, 1, 1]], 8: [[9, 9, 9], [4, 4, 4]]}
                assert recorded_engine.forwards[1:] == expected[depth] and right == {1: 18, 8: 33}[depth]
            if kind is WrongScript:
                assert len(recorded_engine.forwards) == len(plain.forwards) and right == 0


@pytest.mark.parametrize("kind", [ScriptedDrafter, MixedScript, WrongScript])
@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_no_forward_goes_beyond_the_limit(model, monkeypatch, kind, most):
    """A sequence of `most` tokens needs one position less; its KV cache would refuse more."""
    texts = texts_of(RecordedEngine(model, monkeypatch, terminal_ids=()).run(num_samples=2, max_tokens=12), 2)
    drafter = scripted(kind, texts, 8)
    recorded_engine = RecordedEngine(model, monkeypatch, drafter, terminal_ids=(), draft=8).run(
        num_samples=2, max_tokens=most
    )
    assert texts_of(recorded_engine, 2) == [text[: len(PROMPT) + most] for text in texts]
    assert all(state.length == len(PROMPT) + most - 1 for state in recorded_engine.states)


@pytest.mark.parametrize("kind", [None, ScriptedDrafter, MixedScript, WrongScript])
def test_terminal_ids_among_draft_tokens(model, monkeypatch, kind):
    """The sequence ends there, and the draft tokens after it are dropped, even correct ones."""
    options = dict(num_samples=5, max_tokens=16, temperature=2.0, seed=3)
    whole = texts_of(RecordedEngine(model, monkeypatch, terminal_ids=()).run(**options), 5)
    ends = {whole[1][len(PROMPT) + 2], whole[4][len(PROMPT) + 5], whole[2][len(PROMPT)]}
    plain = RecordedEngine(model, monkeypatch, terminal_ids=ends).run(**options)
    for depth in (3, 8):
        drafter = kind and scripted(kind, whole, depth)
        recorded_engine = RecordedEngine(model, monkeypatch, drafter, terminal_ids=ends, draft=depth).run(**options)
        assert recorded_engine.steps == plain.steps
        assert [state.length for state in recorded_engine.states] == [state.length for state in plain.states]
        check_kv(model, recorded_engine.states, plain.states)
    batch = Engine(model, terminal_ids=ends, draft=3).generate_batch(PROMPT, **options)
    assert batch == Engine(model, terminal_ids=ends).generate_batch(PROMPT, **options)


def test_a_sequence_that_runs_ahead_continues_and_the_steps_wait(model, monkeypatch):
    """The drafts of one sequence are accepted, those of the others rejected: it needs a fourth of their forwards."""
    texts = texts_of(RecordedEngine(model, monkeypatch, terminal_ids=()).run(num_samples=3, max_tokens=13), 3)

    class FirstIsRight(ScriptedDrafter):
        def is_wrong(self, row, position):
            return row > 0

    drafter = scripted(FirstIsRight, texts)
    recorded_engine = RecordedEngine(model, monkeypatch, drafter, terminal_ids=(), draft=3)
    steps = recorded_engine.engine.generate(PROMPT, num_samples=3, max_tokens=13)
    for count in range(1, 14):
        next(steps)
        assert len(recorded_engine.forwards) == count  # no extra forward, however far the first sequence is
    assert next(steps, None) is None
    assert recorded_engine.forwards[1:5] == [[4, 4, 4]] * 3 + [[4, 4]]


def test_sequences_with_the_same_text_stay_together(load, monkeypatch):
    """Sequences at different positions request more experts; one that drafts alone would separate them for good."""
    model = load(EMBEDDED_SNAPSHOT, DRAFT="auto").model

    class FirstAlone(DraftLength):
        def choose(self, offers, *more):
            most = min(2, offers[0].get("MTP", 0))
            return [("MTP", most) if most else (None, 0), *[(None, 0)] * (len(offers) - 1)]

    recorded_engine = RecordedEngine(model, monkeypatch, terminal_ids=(), draft="auto")
    recorded_engine.engine.draft_length = FirstAlone()
    list(recorded_engine.engine.generate(TINY["prompt_ids"], num_samples=4, max_tokens=30, temperature=0))
    assert len(recorded_engine.forwards) < 25 and all(len(set(tokens)) == 1 for tokens in recorded_engine.forwards)
    choices, offers = [("MTP", 3), (None, 0), ("MTP", 1)], [{"MTP": 4}] * 3
    sequences = [Sequence([first, 1, 2], make_kv_cache(model.config, 9), Sampler(), 9) for first in (7, 7, 8)]
    assert align_choices(sequences, choices, offers, 7) == [("MTP", 3), ("MTP", 3), ("MTP", 1)]
    assert align_choices(sequences, choices, offers, 6) == choices  # more rows than fit


def test_the_trained_mtp_layer_drafts_for_several_sequences(load, monkeypatch):
    model = load(EMBEDDED_SNAPSHOT, DRAFT="auto").model
    prompt, expected = TINY["prompt_ids"], TINY["full_ids"]
    engine_of_all = Engine(model, terminal_ids=(), draft=3)
    sequences, _ = engine_of_all.generate_batch(prompt, 4, max_tokens=40, temperature=0)
    assert sequences == [expected[: len(prompt) + 40]] * 4
    forwards = engine_of_all.draft_length.depths.total() / 4
    assert 39 / forwards > 1.5
    first, second = engine_of_all.draft_length.summary_lines()
    assert "(mean batch of 4.0 sequences)" in first and "16 rows" in second
    again, _ = engine_of_all.generate_batch(prompt, 2, max_tokens=20, seed=5)  # its DraftLength is kept
    assert again == Engine(model, terminal_ids=()).generate_batch(prompt, 2, max_tokens=20, seed=5)[0]


# --- tools ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [dict(temperature=0), dict(temperature=1.5, seed=3)], ids=["greedy", "sampled"])
def test_tools_are_called_as_without_drafts(model, monkeypatch, how):
    """Forced tokens come at the same steps with the same masks; a draft token after a call is accepted only if it
    equals the forced one."""
    options = dict(num_samples=3, max_tokens=24, **how)
    whole = texts_of(RecordedEngine(model, monkeypatch, terminal_ids=()).run(**options), 3)
    start, end = whole[0][len(PROMPT) + 1], whole[0][len(PROMPT) + 4]
    calls = []

    def add(text):
        calls.append(text)
        return " ".join(str((int(word) + 7) % VOCAB) for word in text.split())

    tools = dict(tools=[Tool(start, end, 500, 501, add)], terminal_ids=())
    plain = RecordedEngine(model, monkeypatch, **tools).run(**options)
    expected, calls = list(calls), []
    ids, masks = plain.row(0)
    assert ids[:6] == [*whole[0][len(PROMPT) : len(PROMPT) + 5], 500] and masks[:6] == [1] * 5 + [0]
    assert len(plain.forwards) < 24 if how["temperature"] == 0 else expected
    texts = texts_of(plain, 3)
    drafters = [
        None,
        *(scripted(kind, known, 8) for kind in (ScriptedDrafter, MixedScript, WrongScript) for known in (texts, whole)),
    ]
    for depth in (1, 3, 8, "auto"):
        for drafter in drafters if depth == 8 else [None]:
            recorded_engine = RecordedEngine(model, monkeypatch, drafter, draft=depth, **tools).run(**options)
            assert recorded_engine.steps == plain.steps and sorted(calls) == sorted(expected)
            check_kv(model, recorded_engine.states, plain.states)
            calls.clear()


@pytest.mark.parametrize("most", [24, 12])
def test_forced_tokens_need_one_forward(model, monkeypatch, most):
    """Also if they are more than the limit of a forward."""
    greedy = texts_of(
        RecordedEngine(model, monkeypatch, terminal_ids=()).run(num_samples=1, max_tokens=4, temperature=0), 1
    )
    start, end = greedy[0][len(PROMPT)], greedy[0][len(PROMPT) + 3]
    tools = dict(tools=[Tool(start, end, 500, 501, lambda text: " ".join(map(str, range(100, 110))))])
    for depth in (0, 3):
        recorded_engine = RecordedEngine(model, monkeypatch, terminal_ids=(), draft=depth, **tools)
        ids, masks = recorded_engine.run(num_samples=1, max_tokens=most, temperature=0).row(0)
        assert ids[3 : 3 + 13] == [end, 500, *range(100, 110), 501][: most - 3] and len(ids) == most
        assert masks[:16] == ([1] * 4 + [0] * 12)[:most]
        if depth == 0:
            assert recorded_engine.forwards == [
                [len(PROMPT)],
                [1],
                [1],
                [1],
                *([[13]] + [[1]] * 7 if most == 24 else []),
            ]


# --- expert uses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ScriptedDrafter, MixedScript, WrongScript])
def test_only_accepted_tokens_of_each_sequence_count_as_expert_uses(load, monkeypatch, kind):
    model = load(EMBEDDED_SNAPSHOT, DRAFT="auto").model
    prompt, num_layers = TINY["prompt_ids"], len(model.config.sparse_layers)
    options = dict(num_samples=3, max_tokens=30, temperature=1.0, seed=2)
    texts = Engine(model, terminal_ids=()).generate_batch(prompt, **options)[0]
    for policy in model.experts.policies:
        for layer in policy.layers.values():
            for counts in layer.counts:
                counts.sums = [0.0] * len(counts.sums)
    learned, plain = [], Drafter.retract_uses

    def retract_uses(self, accepted_rows):
        learned.append((accepted_rows, [sorted(set(rows.tolist())) for _, _, rows in self.routes.routes]))
        plain(self, accepted_rows)
        assert self.routes is None

    monkeypatch.setattr(Drafter, "retract_uses", retract_uses)
    monkeypatch.setattr(generate.engine, "Drafter", scripted(kind, texts))
    drafting = Engine(model, terminal_ids=(), draft=3)
    assert drafting.generate_batch(prompt, **options)[0] == texts
    for right, routes in learned:
        assert len(routes) == num_layers and all(rows == routes[0] for rows in routes)
        assert right <= set(routes[0])
        if kind is ScriptedDrafter:
            assert right == set(routes[0])
        if kind is WrongScript:  # of [token, 3 draft tokens] for each row, fewer at the end
            assert len(right) == 3 and 0 in right
    # Of each sequence all but the last token went through, each with 4 experts a layer, less what decayed.
    uses = sum(total for (layer, _), total in model.experts.use_counts().items() if layer < model.config.num_layers)
    tokens = len(prompt) + 3 * 29
    assert 0.75 * tokens < uses / num_layers / 4 <= tokens


def test_bad_drafts_are_refused(model):
    for draft in ("some", -1, 1.5):
        with pytest.raises(ValueError, match=f"draft={draft}: expected auto or a number of draft tokens"):
            Engine(model, draft=draft)
    assert Engine(model, draft=None).draft_length.most == 0

    class ByHeads:
        config = type("Config", (), {"sequence_len": 8})

    assert Engine(ByHeads(), terminal_ids=()).by_heads
    with pytest.raises(ValueError, match="a model that keeps keys and values by heads cannot draft"):
        Engine(ByHeads(), terminal_ids=(), draft="auto")
