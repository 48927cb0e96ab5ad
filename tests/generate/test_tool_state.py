"""ToolState: tool calls and forced tokens on scripted ids."""

import pytest

from generate.tools.calculator import calculate
from generate.tools.tool_state import Tool, ToolState

START, END, OUT, OUT_END, STOP, BOS = range(1000, 1006)  # ordinary ids are code points
OTHER_START, OTHER_END = 1010, 1011
CALCULATOR = Tool(START, END, OUT, OUT_END, calculate)


class Characters:
    """A tokenizer: one id a character."""

    def encode(self, text):
        return [ord(c) for c in text]

    def decode(self, ids):
        return "".join(chr(i) for i in ids)


def ids_of(text):
    return Characters().encode(text)


def make_row(*tools, prompt=(BOS, 65)):
    return ToolState(prompt, tools or (CALCULATOR,), Characters(), {STOP, BOS})


def play(row, sampled):
    """Feed the sampled ids one by one -> emitted ids and masks."""
    steps = [row.next_token(token) for token in sampled]
    return [token for token, _ in steps], [mask for _, mask in steps]


def injected(row, ids):
    """The text that is forced after a block of these ids."""
    play(row, [START, *ids, END])
    forced = [row.next_token(0)[0] for _ in range(len(row.forced))]
    return Characters().decode(forced[1:-1]) if forced else None


def test_a_result_is_forced_token_by_token():
    """The samples of forced steps are discarded; the step of the end token itself is still sampled."""
    row, block = make_row(), [START, *ids_of("6*7"), END]
    assert play(row, block) == (block, [1] * len(block))
    assert row.has_forced and row.open_tool is None and row.buffer == []
    ids, masks = play(row, [7, STOP, START, None, 90])
    assert ids == [OUT, *ids_of("42"), OUT_END, 90]
    assert masks == [0, 0, 0, 0, 1]
    assert not row.has_forced and not row.is_completed and row.open_tool is None
    assert row.ids == [BOS, 65, *block, *ids]


def test_the_prompt_is_copied_and_starts_nothing():
    prompt = [BOS, START, 49]
    row = make_row(prompt=prompt)
    row.next_token(66)
    assert prompt == [BOS, START, 49] and row.ids == [BOS, START, 49, 66]
    assert not row.is_completed and row.open_tool is None


def test_a_second_start_restarts_the_block():
    assert injected(make_row(), [*ids_of("9*"), START, *ids_of("1+1")]) == "2"


def test_a_stray_end_does_nothing():
    row = make_row()
    assert play(row, [END, 66, END]) == ([END, 66, END], [1, 1, 1])
    assert not row.has_forced


@pytest.mark.parametrize("text", ["", "1/0", "hello", "2**3"])
def test_an_empty_or_declined_block_injects_nothing(text):
    row = make_row()
    assert injected(row, ids_of(text)) is None
    assert row.next_token(66) == (66, 1)
    assert injected(row, ids_of("1+1")) == "2"  # the block is closed and its buffer empty


@pytest.mark.parametrize("result", [0, 0.0, False, (), "", [1]])
def test_any_result_but_none_is_injected(result):
    tool = Tool(START, END, OUT, OUT_END, lambda text: result)
    assert injected(make_row(tool), ids_of("x")) == str(result)


def test_an_empty_block_runs_nothing():
    assert injected(make_row(Tool(START, END, OUT, OUT_END, lambda text: "ran")), []) is None


def test_the_calculators_zero_is_injected():
    assert injected(make_row(), ids_of("5-5")) == "0"
    assert injected(make_row(), ids_of("'abc'.count('z')")) == "0"


class Unprintable:
    def __str__(self):
        raise TypeError("no text")


@pytest.mark.parametrize("run", [lambda text: 1 // 0, lambda text: Unprintable(), lambda text: 10**5000])
def test_a_tool_that_raises_declines(run):
    """The last is an integer that Python refuses to write out."""
    row = make_row(Tool(START, END, OUT, OUT_END, run))
    assert injected(row, ids_of("x")) is None
    assert play(row, [66, STOP]) == ([66, STOP], [1, 1]) and row.is_completed


def test_ids_without_a_text_decline():
    assert injected(make_row(), [-1]) is None


def test_a_terminal_completes_for_good():
    for terminal in (STOP, BOS):
        row = make_row()
        assert row.next_token(terminal) == (terminal, 1)  # it is emitted
        assert row.is_completed
        assert injected(row, ids_of("1+1")) == "2"  # beside sequences that continue, its tools still run
        assert row.is_completed


def test_a_terminal_in_a_block_completes_and_is_part_of_it():
    seen = []
    row = make_row(Tool(START, END, OUT, OUT_END, seen.append))
    play(row, [START, 49, STOP, 50])
    assert row.is_completed and row.buffer == [49, STOP, 50]
    row.next_token(END)
    assert seen == [Characters().decode([49, STOP, 50])]


def test_forced_ids_go_through_the_same_rules():
    """A forced terminal completes; forced start and end ids open and close a block."""
    texts = {"a": chr(STOP), "b": chr(START) + "a" + chr(END)}
    row = make_row(Tool(START, END, OUT, OUT_END, texts.get))
    play(row, [START, *ids_of("a"), END, 0])
    assert not row.is_completed
    assert row.next_token(66) == (STOP, 0) and row.is_completed

    row = make_row(Tool(START, END, OUT, OUT_END, texts.get))
    play(row, [START, *ids_of("b"), END])
    ids, masks = play(row, [66] * 9)
    assert ids == [OUT, START, *ids_of("a"), END, OUT_END, OUT, STOP, OUT_END, 66]
    assert masks == [0] * 8 + [1] and row.is_completed


def test_sequences_in_different_states():
    """One forces, one is in a block, one has ended; none sees another's queue, buffer or history."""
    prompt = [BOS]
    forcing, writing, done = rows = [ToolState(prompt, (CALCULATOR,), Characters(), {STOP}) for _ in range(3)]
    sampled = (
        (START, 49, END, 90, 91, 92, 93),
        (66, START, 50, 51, 52, END, 94),
        (67, 68, STOP, 69, 70, 71, 72),
    )
    for column in zip(*sampled, strict=True):  # step by step over all sequences
        for row, token in zip(rows, column, strict=True):
            row.next_token(token)
    assert forcing.ids == [BOS, START, 49, END, OUT, 49, OUT_END, 93] and not forcing.has_forced
    assert writing.ids == [BOS, 66, START, 50, 51, 52, END, OUT] and list(writing.forced) == [
        *ids_of("234"),
        OUT_END,
    ]
    assert done.ids == [BOS, 67, 68, STOP, 69, 70, 71, 72] and prompt == [BOS]
    assert [row.is_completed for row in rows] == [False, False, True]


def test_two_tools():
    """The start id chooses the tool; another start switches; the end id of another tool is an ordinary id."""
    seen = []
    other = Tool(OTHER_START, OTHER_END, OUT, OUT_END, lambda text: seen.append(text) or text.upper())
    row = make_row(CALCULATOR, other)
    play(row, [OTHER_START, 97, END, 98, OTHER_END])
    assert list(row.forced) == [OUT, 65, *ids_of(chr(END).upper()), 66, OUT_END]
    row = make_row(CALCULATOR, other)
    play(row, [OTHER_START, 97, START, *ids_of("1+1"), END])
    assert list(row.forced) == [OUT, 50, OUT_END] and len(seen) == 1


def test_without_tools_every_id_is_ordinary():
    row = ToolState([1], terminal_ids=[STOP])
    assert play(row, [START, END, STOP]) == ([START, END, STOP], [1, 1, 1])
    assert row.is_completed and not row.has_forced


def test_tools_with_the_same_start_id_are_refused():
    same_start = Tool(START, OTHER_END, OUT, OUT_END, calculate)
    start_is_an_end = Tool(END, OTHER_END, OUT, OUT_END, calculate)
    closes_with_its_start = Tool(START, START, OUT, OUT_END, calculate)
    for tools in ([CALCULATOR, same_start], [CALCULATOR, start_is_an_end], [closes_with_its_start]):
        with pytest.raises(ValueError, match="a start id of its own"):
            ToolState([1], tools, Characters())
    with pytest.raises(ValueError, match="tools need a tokenizer"):
        ToolState([1], [CALCULATOR])
