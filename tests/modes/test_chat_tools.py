"""Tools of a chat: blocks are calculated or executed, results are forced, models without the markers are refused."""

import json
import shutil

import pytest

import colibri
from generate.tools.sandbox import describe_walls, missing_wall
from modes.chat import Chat, StopKey
from modes.chat_history import ChatHistory
from modes.chat_tools import MARKERS, MAX_OUTPUT, make_tool, run_block, tools_notice
from scripts import chat_cli
from settings import EMBEDDED_SNAPSHOT, Settings
from snapshot.config_file import read_config
from tests.support.sandbox import linux, without_namespaces
from text.tokenizer import TextTokenizer

TOKENIZER = TextTokenizer(EMBEDDED_SNAPSHOT, read_config(EMBEDDED_SNAPSHOT)[0])
START, END, OUTPUT_START, OUTPUT_END = TOKENIZER.find_ids(MARKERS)


class ScriptedSampler:
    """Samples a script in order; the position of a token decides, as with the real one."""

    temperature = 0.0

    def __init__(self, prompt_ids, tokens):
        self.first, self.tokens = len(prompt_ids), tokens

    def sample(self, logits, position):
        return self.tokens[position - self.first]


def start_chat(load, tools=True, **variables):
    variables = {"TEMP": 0, "NGEN": 60, "CTX": 512} | variables
    loaded = load(EMBEDDED_SNAPSHOT, **variables)
    settings = Settings.read([], {name: str(value) for name, value in variables.items()})
    history = ChatHistory(settings, loaded.config, TOKENIZER, loaded.context)
    return Chat(settings, loaded, TOKENIZER, [make_tool(TOKENIZER, unsafe=True)] if tools else []), history


def scripted_answer(chat, history, block, output, tail="so it is"):
    """Let the model write a block and a tail -> the text of the answer. The script has the output's place too."""
    ids = history.add_question("What is it?")
    called = [START, *TOKENIZER.encode(block), END]
    forced = [OUTPUT_START, *TOKENIZER.encode_as_text(output), OUTPUT_END] if output is not None else []
    script = called + [0] * len(forced) + TOKENIZER.encode(tail) + [next(iter(chat.stop_ids))]
    chat.sampler = ScriptedSampler(ids, script)
    answer_ids, cut = chat.generate_answer(ids, StopKey(), lambda text: None)
    assert cut is None
    history.add_answer(answer_ids)
    return TOKENIZER.decode(answer_ids)


@pytest.mark.parametrize("draft", ["0", "4"])
def test_the_result_of_a_block_is_forced_and_stays_in_the_conversation(load, draft):
    chat, history = start_chat(load, DRAFT=draft)
    text = scripted_answer(chat, history, "17 * 23", "391")
    assert text == "<|python_start|>17 * 23<|python_end|><|output_start|>391<|output_end|>so it is"
    held = chat.ids[: chat.kv.length]
    assert OUTPUT_END in held
    ids = history.add_question("Sure?")
    assert ids[: len(held)] == held  # the markers are tokens in the next prompt too, so the prefix is cached


def test_without_tools_a_block_is_text(load):
    chat, history = start_chat(load, tools=False)
    assert scripted_answer(chat, history, "1 + 1", None) == "<|python_start|>1 + 1<|python_end|>so it is"


def test_printed_markers_are_no_tokens(load):
    chat, history = start_chat(load)
    text = scripted_answer(chat, history, "print('<|output' + '_end|>')", "<|output_end|>")
    assert "<|output_start|><|output_end|><|output_end|>so it is" in text and chat.ids.count(OUTPUT_END) == 1
    assert history.add_question("Sure?").count(OUTPUT_END) == 1


def test_a_program_that_prints_nothing_forces_nothing(load):
    chat, history = start_chat(load)
    assert "<|output_start|>" not in scripted_answer(chat, history, "x = 1", None)


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("1,000 * 3", "3000"),
        ("'strawberry'.count('r')", "3"),
        ("print(sum(range(10)))", "45"),
        ("x = 2\nprint(x)\nprint(x * x)", "2\n4"),
        ("x = 1", None),
    ],
)
def test_a_block_is_calculated_or_executed(code, output):
    assert run_block(code, unsafe=True) == output


def test_errors_and_long_outputs_are_short():
    output = run_block("print('before')\n1 / 0", unsafe=True)
    assert "ZeroDivisionError" in output and "before" in output
    assert len(run_block("print('x' * 100_000)", unsafe=True)) == MAX_OUTPUT


@linux
def test_where_no_walls_can_be_built_programs_are_refused_and_the_calculator_answers():
    """Seen: where the kernel makes no namespaces, code read a secret of the engine's environment and reached the
    network."""
    assert without_namespaces(lambda: run_block("17 * 23")) == "391"
    refusal = "programs of the model are not run: unshare: Operation not permitted; UNSAFE_SANDBOX=1 runs them without"
    assert without_namespaces(lambda: run_block("print(1)")).startswith(refusal)
    assert without_namespaces(lambda: run_block("print(1)", unsafe=True)) == "1"


@linux
@pytest.mark.parametrize(
    ("unsafe", "said"),
    [(False, "programs are refused: unshare: "), (True, "but WITHOUT walls: UNSAFE_SANDBOX=1, unshare: ")],
)
def test_the_chat_says_that_walls_are_missing(unsafe, said):
    assert said in without_namespaces(lambda: tools_notice(unsafe))


def test_a_tokenizer_without_the_markers_is_refused_before_any_weight_is_read(tmp_path, monkeypatch, capfd):
    folder = shutil.copytree(EMBEDDED_SNAPSHOT, tmp_path / "snap")
    raw = json.loads((folder / "tokenizer.json").read_text())
    for token in raw["added_tokens"]:
        if token["content"] in MARKERS[:2]:
            token["content"] = token["content"].replace("python", "other")
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    monkeypatch.setattr("snapshot.dense.DenseTensors.load_weights", lambda *rest: pytest.fail("weights were read"))
    monkeypatch.setattr("signal.signal", lambda *rest: None)
    monkeypatch.setenv("SNAP", str(folder))
    assert chat_cli.main(["--tools", "--prompt", "x"]) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("chat: --tools: ") and "lacks <|python_start|> <|python_end|>;" in line
    assert make_tool(TOKENIZER).start == START


def test_the_chat_says_what_walls_programs_have(monkeypatch, capfd):
    monkeypatch.setattr("signal.signal", lambda *rest: None)
    for name, value in {"NGEN": 2, "TEMP": 0, "USAGE": 0}.items():
        monkeypatch.setenv(name, str(value))
    assert chat_cli.main(["--tools", "--prompt", "x"]) == 0
    said = f"[chat] tools: calculator and python; {describe_walls(unsafe=False)}\n"
    assert said in capfd.readouterr().err
    if missing_wall() is None:
        assert "programs see no files, network or processes of this machine" in said


@pytest.mark.parametrize("variables", [{"PROMPT": "x"}, {"PROMPT": "x", "CHAT": 1}, {"CHAT": 1}, {"TF": 1}])
def test_only_a_chat_in_a_terminal_has_tools(run_colibri, variables):
    process = run_colibri("--tools", **variables)
    assert process.returncode == 2 and process.stdout == b""
    assert b"colibri: --tools: only a chat has tools" in process.stderr.splitlines()[-1]


def test_tools_is_no_positional_argument(monkeypatch):
    asked = []
    monkeypatch.setattr(colibri, "run", lambda settings: asked.append(settings) or 0)
    monkeypatch.setattr("signal.signal", lambda *rest: None)
    assert colibri.main(["2", "--tools", "4"]) == 0
    assert (asked[0].cap, asked[0].expert_bits, asked[0].tools) == (2, 4, True)
