"""Engine: one prefill, N sequences in lock-step, tools with forced tokens; on our model and on scripted ones."""

import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from errors import Refused
from forward.kv_cache import kv_cache_bytes
from generate.batch import Batch
from generate.engine import Engine, naive_generate
from generate.sampler import Sampler
from generate.tools.calculator import calculate
from generate.tools.tool_state import Tool
from settings import EMBEDDED_SNAPSHOT
from tests.conftest import FIXTURES, ROOT, read_json, reference

REF, _ = reference("glm_moe_dsa")
PROMPT = REF["greedy"]["prompt"]
TINY = read_json(EMBEDDED_SNAPSHOT / "ref_glm.json")


@pytest.fixture
def model(load):
    return load(FIXTURES / "glm_moe_dsa", cap=3).model


# --- scripted models --------------------------------------------------------------------------------------

BOS, END, START, STOP, OUT, OUT_END = 256, 257, 258, 259, 260, 261
VOCAB = 262


class ByteTokenizer:
    """A tokenizer of bytes, with names for the specials above them."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class ScriptedModel:
    """A model with a cache by heads. `script(row, ids so far) -> id` is its next id, or None for uniform
    logits. It reads its history from the cache, so that a wrong clone or trim would show."""

    def __init__(self, script):
        self.script, self.config = (
            script,
            SimpleNamespace(n_layer=2, n_head=4, n_kv_head=2, n_embd=16, sequence_len=128),
        )
        self.calls = []  # (rows, tokens) of each forward

    def get_device(self):
        return "cpu"

    def forward(self, ids, kv_cache):
        rows, count = ids.shape
        self.calls.append((rows, count))
        for layer in range(2):
            values = ids[:, :, None, None].expand(rows, count, 2, 4).float()
            known, _ = kv_cache.append(layer, values, -values)
        kv_cache.advance(count)
        number = kv_cache.extra.setdefault("number", torch.zeros(rows, 1))
        number += count
        logits = torch.zeros(rows, count, VOCAB)
        for row in range(rows):
            history = known[row, :, 0, 0].int().tolist()
            assert int(number[row]) == len(history)
            wanted = self.script(row, history)
            if wanted is not None:
                logits[row, -1, wanted] = 50.0
        return logits


def uniform(*_):
    return None


def emit_ids(*words):
    """A script: after the prompt of one id, these ids one after the other."""
    ids = [i for word in words for i in (ByteTokenizer().encode(word) if isinstance(word, str) else [word])]
    return lambda row, history: ids[len(history) - 1] if len(history) - 1 < len(ids) else END


CALCULATOR = Tool(START, STOP, OUT, OUT_END, calculate)


def engine_of(script, tools=(), terminal_ids=(END, BOS)):
    return Engine(ScriptedModel(script), ByteTokenizer(), terminal_ids, tools)


# --- nanochat's own tests ---------------------------------------------------------------------------------------------


def test_sequences_sample_their_own_first_token():
    first, _ = next(engine_of(uniform).generate([BOS], num_samples=16, max_tokens=5))
    assert len(set(first)) > 1


@pytest.mark.parametrize("seed", [1, 42, 123, 999])
def test_a_seed_reproduces_the_text(seed):
    runs = [engine_of(uniform).generate_batch([BOS, 5], max_tokens=10, seed=seed)[0] for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]


def test_seeds_differ():
    texts = {tuple(engine_of(uniform).generate_batch([BOS], max_tokens=8, seed=seed)[0][0]) for seed in range(10)}
    assert len(texts) > 1


def test_temperature_0_ignores_the_seed(model):
    runs = [Engine(model).generate_batch(PROMPT, max_tokens=6, temperature=0, seed=seed)[0] for seed in (1, 2)]
    assert runs[0] == runs[1] == [PROMPT + REF["greedy"]["continuation"][:6]]


@pytest.mark.parametrize("most", [0, 1, 4, 16, 64])
def test_max_tokens(most):
    steps = list(engine_of(uniform, terminal_ids=()).generate([BOS], max_tokens=most))
    assert len(steps) == most


@pytest.mark.parametrize("count", [1, 4, 16, 64])
def test_num_samples(count):
    sequences, masks = engine_of(uniform).generate_batch([BOS], num_samples=count, max_tokens=3)
    assert len(sequences) == len(masks) == count


def test_top_k_keeps_exactly_k():
    engine = engine_of(uniform, terminal_ids=())
    columns = [column for column, _ in engine.generate([BOS], num_samples=64, max_tokens=4, top_k=3)]
    assert {token for column in columns for token in column} == {0, 1, 2}  # ties: the lowest ids
    assert {t for c, _ in engine.generate([BOS], num_samples=8, max_tokens=2, top_k=1) for t in c} == {0}
    logits = torch.tensor([0.0, 3.0, 1.0, 3.0, 2.0])
    p = Sampler(temperature=2.0, top_k=3).probabilities(logits)
    expected = torch.tensor([3.0, 3.0, 2.0], dtype=torch.float64).div(2).softmax(0)
    torch.testing.assert_close(p[[1, 3, 4]], expected)
    assert p[[0, 2]].tolist() == [0, 0]


# --- one prefill, sequences that end -------------------------------------------------------------------------------


def test_one_prefill_for_any_number_of_sequences_and_no_extra_forward():
    for count in (1, 7):
        engine = engine_of(uniform, terminal_ids=())
        assert len(list(engine.generate([BOS, 1, 2], num_samples=count, max_tokens=4))) == 4
        assert engine.model.calls == [(1, 3)] + [(count, 1)] * 3
    engine = engine_of(uniform)
    steps = engine.generate([BOS], num_samples=2, max_tokens=4)
    assert engine.model.calls == []  # nothing runs before the first next
    next(steps)
    assert engine.model.calls == [(1, 1)]


def test_as_many_tokens_as_the_model_has_positions():
    steps = list(engine_of(uniform, terminal_ids=()).generate([BOS] * 120))
    assert len(steps) == 8


def test_sequences_that_end_leave_the_forward_and_the_others_do_not_change(model, monkeypatch):
    """Sampled sequences with a terminal id that some sample early: each equals that of a run where none ends."""
    engine = Engine(model, terminal_ids=())
    whole, _ = engine.generate_batch(PROMPT, num_samples=6, max_tokens=16, temperature=2.0, seed=3)
    ends = {whole[1][len(PROMPT) + 2], whole[4][len(PROMPT) + 5]}
    some = Engine(model, terminal_ids=ends)
    rows, plain = [], Batch.run_layers

    def counted(batch, scheduled, *more):
        rows.append(len(scheduled))
        return plain(batch, scheduled, *more)

    monkeypatch.setattr(Batch, "run_layers", counted)
    sequences, masks = some.generate_batch(PROMPT, num_samples=6, max_tokens=16, temperature=2.0, seed=3)
    for row in range(6):
        text = whole[row][len(PROMPT) :]
        stop = next((i for i, token in enumerate(text) if token in ends), len(text))
        assert sequences[row] == PROMPT + text[:stop] and masks[row] == [0] * len(PROMPT) + [1] * stop
    assert rows[-1] < 6 and rows == [1, *sorted(rows[1:], reverse=True)]


def test_a_finished_sequence_repeats_its_terminal_id_with_mask_0():
    script = lambda row, history: END if history[2:3] == [65] else 66  # noqa: E731

    class FirstDiffers(ScriptedModel):
        def forward(self, ids, kv_cache):
            logits = super().forward(ids, kv_cache)
            if ids.shape[1] == 2:  # the prompt: two first tokens are as likely
                logits[:] = 0
                logits[:, -1, [65, 66]] = 50.0
            return logits

    engine = Engine(FirstDiffers(script), ByteTokenizer(), (END,))
    steps = list(engine.generate([BOS, 1], num_samples=12, max_tokens=5, seed=1))
    ended = [row for row in range(12) if steps[0][0][row] == 65]
    assert 0 < len(ended) < 12
    for row in range(12):
        column, masks = zip(*((ids[row], mask[row]) for ids, mask in steps), strict=True)
        if row in ended:
            assert column == (65, END, END, END, END) and masks == (1, 1, 0, 0, 0)
        else:
            assert column == (66,) * 5 and masks == (1,) * 5


@pytest.mark.parametrize("count", [1, 3])
def test_greedy_sequences_equal_a_full_forward_for_every_token(model, count):
    expected = naive_generate(model, PROMPT, 12, Sampler())
    assert expected == REF["greedy"]["continuation"][:12]
    sequences, _ = Engine(model, terminal_ids=()).generate_batch(
        PROMPT, num_samples=count, max_tokens=12, temperature=0
    )
    assert sequences == [PROMPT + expected] * count


def test_sampled_sequences_equal_a_full_forward_for_every_token(model):
    sequences, _ = Engine(model, terminal_ids=()).generate_batch(PROMPT, num_samples=3, max_tokens=8, seed=9)
    for row, ids in enumerate(sequences):
        assert ids == PROMPT + naive_generate(model, PROMPT, 8, Sampler(1.0, seed=9, row=row))


def test_an_expert_of_several_sequences_is_requested_once(load):
    model = load(EMBEDDED_SNAPSHOT, cap=4).model
    requests, plain = [], type(model.experts).request
    model.experts.request = lambda layer, uses, rows: (
        requests.append((layer, rows, sum(uses.values()))) or plain(model.experts, layer, uses, rows)
    )
    engine = Engine(model, terminal_ids=())
    list(engine.generate(TINY["prompt_ids"], num_samples=5, max_tokens=4))
    assert [layer for layer, _, _ in requests] == [1, 2, 3, 4] * 4
    assert [rows for _, rows, _ in requests[::4]] == [len(TINY["prompt_ids"]), 5, 5, 5]
    assert all(asked == 4 * rows for _, rows, asked in requests)


def test_the_stop_ids_of_the_model_are_the_default(model):
    assert Engine(model).terminal_ids == set(model.config.stop_ids)


# --- the memory budget ------------------------------------------------------------------------------------------------


def test_rows_that_the_memory_budget_does_not_hold_are_refused_with_numbers(load, monkeypatch):
    """RAM_GB=0.33 was asked and 0.47 GB held, without a word: N KV caches were in no plan."""
    need = load(EMBEDDED_SNAPSHOT, CTX=512).plan.need_bytes
    monkeypatch.setattr("load.plan.rss_bytes", lambda: need)  # of the test process
    loaded = load(EMBEDDED_SNAPSHOT, CTX=512, RAM_GB=(2 * need + 100e6) / 1e9)
    model, plan = loaded.model, loaded.plan
    assert (
        plan.kv_bytes
        < model.kv_room_bytes
        == plan.budget_bytes
        - plan.need_bytes
        + plan.kv_bytes
        + (plan.cache_bytes - sum(len(slots.layers) * slots.slot_bytes for slots in plan.expert_slots))
    )
    engine = Engine(model, terminal_ids=())
    with pytest.raises(Refused) as refused:
        next(engine.generate(PROMPT, num_samples=9999, max_tokens=400))
    text = re.fullmatch(
        r"9999 sequences of (\d+) tokens need (\S+) GB for KV caches, (\S+) GB the memory budget leaves: take at most "
        r"(\d+) sequences, or (\d+) tokens of each, or raise RAM_GB", str(refused.value))  # fmt: skip
    length, needed, room, rows, tokens = map(float, text.groups())
    assert length == len(PROMPT) + 400 > tokens and 0.1 < room < needed and 0 < rows < 9999
    assert room == pytest.approx(model.kv_room_bytes / 1e9, abs=1e-3)
    # what it names is accepted
    assert engine.check(PROMPT, int(rows), 400, 1.0)[1] == length
    monkeypatch.setattr(engine.model.experts, "make_room", lambda num_bytes: made.append(num_bytes))
    made = []
    next(engine.generate(PROMPT, num_samples=3, max_tokens=2))
    assert made == [2 * len(PROMPT) * engine.position_bytes]


ROWS = """
import re, sys
from errors import Refused
from generate.engine import Engine
from load.model import load_model
from machine.memory import peak_rss_bytes
from settings import Settings

loaded = load_model(Settings.read([], {"SNAP": sys.argv[1], "USAGE": "0", "RAM_GB": sys.argv[2], "CTX": "512"}))
engine, prompt, rows = Engine(loaded.model, terminal_ids=()), list(range(5, 305)), 2000
try:
    next(engine.generate(prompt, rows, 60))
except Refused as error:
    rows = int(re.search(r"at most (\\d+) sequences", str(error))[1])
print(rows, sum(1 for _ in engine.generate(prompt, rows, 60)), peak_rss_bytes())
loaded.close()
"""


@pytest.mark.slow
def test_rss_stays_within_the_memory_budget_with_as_many_rows_as_it_holds():
    """200 rows held 0.447 GB where RAM_GB=0.4."""
    command = [sys.executable, "-c", ROWS, str(EMBEDDED_SNAPSHOT), "0.4"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=300).stdout
    rows, steps, peak = map(int, out.split())
    assert 20 < rows < 2000 and steps == 60 and 0.3e9 < peak < 1.05 * 0.4e9


def test_without_a_number_of_tokens_rows_are_as_long_as_memory_holds(model):
    small = replace(model, kv_room_bytes=3 * (len(PROMPT) + 5) * kv_cache_bytes(model.config, 1))
    engine = Engine(small, terminal_ids=())
    with pytest.warns(UserWarning, match=f"3 sequences of .* they end at {len(PROMPT) + 5} tokens"):
        assert len(list(engine.generate(PROMPT, num_samples=3))) == 5
    with pytest.raises(Refused, match="at most 0 sequences"):
        next(engine.generate(PROMPT, num_samples=99))


def test_expert_slots_make_room_for_rows(load):
    """The first row keeps the KV cache of the prompt; slots are released before the others are cloned."""
    experts = load(EMBEDDED_SNAPSHOT, cap=6).model.experts
    [pool] = experts.pools
    experts.guard.spare_bytes = lambda: pool.slot_bytes
    experts.make_room(pool.slot_bytes)
    assert pool.num_usable == pool.num_slots == 24
    experts.make_room(4 * pool.slot_bytes)
    assert pool.num_usable == 21
    experts.make_room(400 * pool.slot_bytes)
    assert pool.num_usable == 4


# --- tools ------------------------------------------------------------------------------------------------------------


def test_a_tool_is_called_and_its_result_forced():
    engine = engine_of(emit_ids(START, "6*7", STOP, " ok", END), tools=[CALCULATOR])

    def script(row, history):
        """Continues after the forced output."""
        plain = [START, *b"6*7", STOP, OUT, *b"42", OUT_END, *b" ok", END]
        return plain[len(history) - 1]

    engine.model.script = script
    [ids], [masks] = engine.generate_batch([BOS], max_tokens=40)
    assert ids == [BOS, START, *b"6*7", STOP, OUT, *b"42", OUT_END, *b" ok"]
    assert masks == [0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1]


def test_a_tool_that_declines_forces_nothing():
    engine = engine_of(emit_ids(START, "os.exit()", STOP, "x", END), tools=[CALCULATOR])
    [ids], [masks] = engine.generate_batch([BOS], max_tokens=40)
    assert ids == [BOS, START, *b"os.exit()", STOP, *b"x"] and set(masks[1:]) == {1}


def test_without_tools_nothing_is_forced():
    [ids], [masks] = engine_of(emit_ids(START, "6*7", STOP, END)).generate_batch([BOS], max_tokens=40)
    assert ids == [BOS, START, *b"6*7", STOP] and set(masks[1:]) == {1}


def test_sequences_have_their_own_tool_state():
    """One sequence calls a tool, the other does not: forced ids of the first never reach the second."""

    class Two(ScriptedModel):
        def forward(self, ids, kv_cache):
            logits = super().forward(ids, kv_cache)
            if ids.shape[1] == 2:
                logits[:] = 0
                logits[:, -1, [START, 66]] = 50.0
            return logits

    def script(row, history):
        if len(history) > 2 and history[2] == START:
            plain = [*b"1+1", STOP, OUT, *b"2", OUT_END, END]
            return plain[len(history) - 3]
        return END if len(history) > 11 else 66

    engine = Engine(Two(script), ByteTokenizer(), (END,), [CALCULATOR])
    sequences, masks = engine.generate_batch([BOS, 1], num_samples=10, max_tokens=20, seed=2)
    called = [BOS, 1, START, *b"1+1", STOP, OUT, *b"2", OUT_END]
    assert {tuple(ids) for ids in sequences} == {tuple(called), (BOS, 1, *[66] * 10)}
    for ids, mask in zip(sequences, masks, strict=True):
        assert mask == ([0, 0, 1, 1, 1, 1, 1, 0, 0, 0] if ids == called else [0, 0] + [1] * 10)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "at least one token id"),
        (["a"], {}, "at least one token id"),
        ([1], {"num_samples": 0}, "num_samples=0"),
        ([1], {"temperature": -1.0}, "temperature=-1.0"),
        ([1], {"max_tokens": -1}, "max_tokens=-1"),
        ([1] * 129, {}, "129 prompt tokens"),
        ([1] * 100, {"max_tokens": 30}, "do not fit 128 positions"),
    ],
)
def test_bad_input_is_refused(prompt, options, message):
    with pytest.raises(ValueError, match=message):
        next(engine_of(uniform).generate(prompt, **options))


def test_tools_need_a_tokenizer():
    with pytest.raises(ValueError, match="tools need a tokenizer"):
        Engine(ScriptedModel(uniform), tools=[CALCULATOR])


def test_a_model_that_does_not_advance_its_cache_is_refused():
    model = ScriptedModel(uniform)
    model.forward = lambda ids, cache: torch.zeros(*ids.shape, VOCAB)
    with pytest.raises(ValueError, match="advanced its cache by 0 for 1 tokens"):
        next(Engine(model).generate([1]))
