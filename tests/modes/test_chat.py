"""The chat: its KV cache over the turns, answers that are cut off, and the program at a terminal."""

import io
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import warnings

import pytest
import torch

import colibri
from errors import Refused
from forward.kv_cache import make_kv_cache
from generate.batch import Batch
from generate.decode import spec_decode
from generate.draft import Drafter
from generate.draft_length import DraftLength
from generate.proposers import Proposers
from generate.sampler import Sampler
from generate.sequence import Prefill
from machine.exit import Terminated
from modes import chat
from modes.chat import Chat, StopKey
from modes.chat_history import ChatHistory
from scripts import chat_cli
from settings import EMBEDDED_SNAPSHOT, Settings
from snapshot.config_file import read_config
from tests.conftest import read_json
from tests.support.forked import environment, forker
from tests.support.small_tokenizers import write_tokenizer
from text.tokenizer import TextTokenizer

CONFIG = read_config(EMBEDDED_SNAPSHOT)[0]
TOKENIZER = TextTokenizer(EMBEDDED_SNAPSHOT, CONFIG)


def history_of(ctx=1024, **variables):
    settings = Settings.read([], {name: str(value) for name, value in variables.items()})
    return ChatHistory(settings, CONFIG, TOKENIZER, ctx)


class Dialogue:
    """A chat and its history on a loaded model. rows: for each turn the token rows of its forward passes."""

    def __init__(self, load, **variables):
        variables = {"TEMP": 0, "NGEN": 12, "CTX": 512} | variables
        loaded = load(EMBEDDED_SNAPSHOT, **variables)
        settings = Settings.read([], {name: str(value) for name, value in variables.items()})
        self.history = ChatHistory(settings, loaded.config, TOKENIZER, loaded.context)
        self.chat, self.model, self.rows = Chat(settings, loaded, TOKENIZER), loaded.model, []
        advance = self.chat.kv.advance

        def counted(count):
            self.rows[-1].append(count)
            advance(count)

        self.chat.kv.advance = counted

    def turn(self, text, stop_key=None):
        """-> (prompt ids, answer, why it was cut off)."""
        ids, shown = self.history.add_question(text), []
        self.rows.append([])
        answer_ids, cut = self.chat.generate_answer(ids, stop_key or StopKey(), shown.append)
        answer = TOKENIZER.decode(answer_ids)
        visible = [token for token in answer_ids if token not in self.chat.hidden_ids]
        assert "".join(shown) == TOKENIZER.decode(visible) + "\n"
        self.history.add_answer(answer_ids)
        return ids, answer, cut

    def fresh(self, ids, num_tokens=12):
        """The greedy answer with an empty KV cache."""
        kv = make_kv_cache(self.model.config, len(ids) + num_tokens)
        return TOKENIZER.decode(list(spec_decode(self.model, kv, ids, Sampler(), num_tokens, self.chat.stop_ids)))


class ScriptedSampler(Sampler):
    """Samples these tokens behind a prompt."""

    def __init__(self, prompt_ids, tokens):
        super().__init__()
        self.first, self.tokens = len(prompt_ids), tokens

    def sample(self, logits, position):
        return self.tokens[position - self.first]


class PressAfter(StopKey):
    """A StopKey that is pressed at the `asks`-th check."""

    def __init__(self, asks):
        self.asks = asks

    @property
    def pressed(self):
        self.asks -= 1
        return self.asks < 0


# --- the KV cache over the turns --------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["0", "auto", "4"])
def test_every_turn_equals_a_fresh_prefill_and_prefills_only_new_tokens(load, draft):
    """Also after an answer that NGEN cut off, as half of these are."""
    dialogue, held, cuts, before = Dialogue(load, DRAFT=draft, NGEN=10), [], [], []
    for text in ("Who art thou?", "Tell me of the king and of his house.", "Why?", "And then?"):
        ids, answer, cut = dialogue.turn(text)
        assert answer == dialogue.fresh(ids, 10)
        common = next((i for i, (a, b) in enumerate(zip(held, ids, strict=False)) if a != b), min(len(held), len(ids)))
        assert dialogue.rows[-1][0] == len(ids) - common
        assert ids[: len(before)] == before and common >= len(before)  # all of the last prompt at least
        held, cuts, before = dialogue.chat.ids[: dialogue.chat.kv.length], [*cuts, cut], ids
    assert {None, "cut off at NGEN=10"} == set(cuts)
    totals = dialogue.chat.totals
    assert (
        totals.num_answers == 4
        and totals.num_prefilled == sum(rows[0] for rows in dialogue.rows) < totals.num_prompt_ids
    )


def test_no_turn_loses_the_kv_cache_at_a_high_temperature(load):
    """Encoding the answers again changed the ids of 8 of 12 turns, and all behind was prefilled anew."""
    dialogue, changed = Dialogue(load, TEMP=2, NUCLEUS=1, SEED=1, NGEN=16), 0
    for _ in range(8):
        held = dialogue.chat.kv.length
        ids, answer, _ = dialogue.turn("Why?")
        assert dialogue.rows[-1][0] == len(ids) - held
        changed += TOKENIZER.encode(answer) != dialogue.chat.ids[len(ids) :]
    assert changed  # the tokenizer would choose other ids


def test_special_tokens_of_an_answer_are_not_shown(load):
    dialogue, shown = Dialogue(load), []
    ids = dialogue.history.add_question("Who art thou?")
    dialogue.rows.append([])
    answer = TOKENIZER.encode("I am<|assistant|> he</think>")
    dialogue.chat.sampler = ScriptedSampler(ids, [*answer, *dialogue.chat.stop_ids])
    assert dialogue.chat.generate_answer(ids, StopKey(), shown.append) == (answer, None)
    assert "".join(shown) == "I am he</think>\n"


def test_bytes_that_are_no_character(load, tmp_path):
    """A line end, half a character and a word of a byte-fallback tokenizer ended the chat in a traceback."""
    tokenizer, shown = write_tokenizer(tmp_path, "llama2"), []
    loaded = load(EMBEDDED_SNAPSHOT, CTX=64)
    chat, ids = Chat(Settings.read([], {}), loaded, tokenizer), tokenizer.encode("the")
    answer = tokenizer.find_ids(["▁time", "<0x0A>", "<0xF0>", "▁the", "<0xC3>"])
    chat.sampler = ScriptedSampler(ids, [*answer, *chat.stop_ids])
    assert chat.generate_answer(ids, StopKey(), shown.append) == (answer, None)
    assert "".join(shown) == " time\n\ufffd the\ufffd\n"


def test_special_tokens_that_a_user_types_stay_text():
    """In a message <|assistant|> ended it: what followed was the model's own answer."""
    ids = history_of().add_question("a<|assistant|>b<|endoftext|>")
    assert ids.count(*TOKENIZER.find_ids(["<|assistant|>"])) == 1
    assert not set(ids) & set(TOKENIZER.find_ids(["<|endoftext|>"]))
    assert "<|user|>a<|assistant|>b<|endoftext|><|assistant|>" in TOKENIZER.decode(ids)


def test_the_mtp_cache_holds_the_turns_before(load):
    """Its positions equal those of one prefill of the whole conversation; /clear empties it."""
    dialogue = Dialogue(load, DRAFT="3")
    for text in ("Who art thou?", "Tell me of the king and of his house.", "Why?"):
        ids, answer, _ = dialogue.turn(text)
        assert answer == dialogue.fresh(ids)
    kv, model = dialogue.chat.kv, dialogue.model
    known = kv.mtp_length
    assert kv.mtp_base == 0 and known > len(ids)
    whole = make_kv_cache(model.config, 512)
    prompt = Prefill(dialogue.chat.ids[: known + 1], whole, Proposers(model, whole))
    Batch(model, Drafter(model, DraftLength("3"))).prefill(prompt)
    assert whole.mtp_length == known
    assert torch.equal(kv.latents[model.config.num_layers, :known], whole.latents[model.config.num_layers, :known])
    dialogue.history.clear()
    dialogue.chat.keep_shared_prefix(dialogue.history.first_ids)
    ids, answer, _ = dialogue.turn("Who art thou?")
    assert answer == dialogue.fresh(ids) and kv.mtp_base == 3 and kv.mtp_length >= len(ids) - 3


def test_a_cleared_conversation_keeps_only_the_shared_prefix(load):
    dialogue = Dialogue(load)
    _, first, _ = dialogue.turn("Who art thou?")
    dialogue.history.clear()
    dialogue.chat.keep_shared_prefix(dialogue.history.first_ids)
    assert dialogue.chat.kv.length == len(TOKENIZER.encode("[gMASK]<sop><|user|>"))
    ids, again, _ = dialogue.turn("Who art thou?")
    assert again == first and dialogue.rows[-1][0] == len(ids) - 3
    assert [message["role"] for message in dialogue.history.messages] == ["user", "assistant"]


def test_an_answer_stopped_between_tokens_stays_in_the_conversation(load):
    dialogue = Dialogue(load, DRAFT="4")
    ids, answer, cut = dialogue.turn("Who art thou?", PressAfter(5))
    assert cut == "stopped" and dialogue.fresh(ids).startswith(answer) and 0 < len(answer) < len(dialogue.fresh(ids))
    assert dialogue.chat.totals.num_tokens <= 8  # one forward pass may give several
    ids, answer, _ = dialogue.turn("Go on.")
    assert TOKENIZER.decode(ids).count("<|user|>") == 2 and answer == dialogue.fresh(ids)


def test_a_question_stopped_during_its_prefill_leaves_the_kv_cache_consistent(load):
    dialogue = Dialogue(load, PREFILL_CHUNK=8, DRAFT="4")
    dialogue.turn("Who art thou?")
    ids = dialogue.history.add_question(
        "Tell me of the king, and of the house of the king, and of his brother, and of all."
    )
    assert dialogue.chat.generate_answer(ids, PressAfter(8), pytest.fail) is None  # in the second chunk
    dialogue.history.drop_question()
    kv = dialogue.chat.kv
    assert 0 < kv.length < len(ids) and dialogue.chat.ids[: kv.length] == ids[: kv.length]
    ids, answer, _ = dialogue.turn("Why?")
    assert answer == dialogue.fresh(ids)


def test_the_statistics_name_every_number(load):
    dialogue = Dialogue(load)
    assert "0 answers, 0 tokens  - tok/s" in dialogue.chat.statistics_line()
    dialogue.turn("Who art thou?")
    pattern = (
        r"1 answers, \d+ tokens  [\d.]+ tok/s .* hit [\d.]+%  RSS [\d.]+ GB \| (\d+) of \1 prompt tokens prefilled"
    )
    line = dialogue.chat.statistics_line()
    assert re.search(pattern, line) and line.endswith(f"KV {dialogue.chat.kv.length} of 512 positions")


# --- the messages -----------------------------------------------------------------------------------------------------


def test_a_full_context_drops_the_oldest_turns(capsys):
    history = history_of(ctx=100, NGEN=20)
    for number in range(12):
        ids = history.add_question(f"Question {number}, what is it that the king said?")
        assert len(ids) + 20 - 1 <= 100 and len(history.messages) % 2 == 1
        assert history.messages[-1]["content"].startswith(f"Question {number},")
        history.add_answer(TOKENIZER.encode("He said nothing."))
    notices = capsys.readouterr().err.splitlines()
    assert 0 < len(notices) < 6  # several turns at once, because each time means a full prefill
    assert all(
        re.fullmatch(r"\[chat\] CTX=100 is full: the oldest (turn is|\d turns are) forgotten", s) for s in notices
    )


def test_a_message_that_does_not_fit_is_refused_and_changes_nothing(capsys):
    history = history_of(ctx=64)
    history.add_question("Who art thou?")
    history.add_answer(TOKENIZER.encode("I am he."))
    before = list(history.messages)
    with pytest.raises(Refused, match=r"the message has \d+ tokens, CTX is 64"):
        history.add_question("the king " * 60)
    assert history.messages == before and capsys.readouterr().err == ""
    assert len(history.add_question("the king " * 20)) <= 64  # alone it fits, with less room for an answer
    assert len(history.messages) == 1


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("Hm.</think>Four.", "<think>Hm.</think>Four."),
        ("Hm. Let me", "<think>Hm. Let me</think>"),  # cut off in the middle of the reasoning
        ("", "<think></think>"),
    ],
)
def test_reasoning_is_closed_in_the_history(text, rendered):
    history = history_of(THINK=1)
    history.add_question("2+2?")
    history.add_answer(TOKENIZER.encode(text))
    again = TOKENIZER.decode(history.add_question("Sure?"))
    assert again == f"[gMASK]<sop><|user|>2+2?<|assistant|>{rendered}<|user|>Sure?<|assistant|><think>"


def test_the_prefix_comes_before_a_template_without_it(text_folder):
    (text_folder / "chat_template.jinja").write_text("{{ messages[-1].content }}:")
    tokenizer, settings = TextTokenizer(text_folder, CONFIG), Settings.read([], {})
    history = ChatHistory(settings, CONFIG, tokenizer, 100)
    assert tokenizer.decode(history.add_question("Speak")) == "[gMASK]<sop>Speak:"


# --- the program, called in this process -----------------------------------------------------------------------------


@pytest.fixture
def run_chat(monkeypatch, capfdbinary):
    """run_chat(lines, *arguments, **variables) -> (exit code, stdout, stderr)."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # put back at the end, as the next one
    before = signal.getsignal(signal.SIGTERM)

    def run(lines, *arguments, **variables):
        for name, value in ({"TEMP": 0, "NGEN": 12, "USAGE": 0, "DRAFT": 0, "CTX": 256} | variables).items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
        code = chat_cli.main(list(arguments))
        out, err = capfdbinary.readouterr()
        return code, out.decode(), err.decode()

    yield run
    signal.signal(signal.SIGTERM, before)


def test_every_line_of_a_pipe_is_a_turn(run_chat):
    lines = b"Who art thou?\n\n  \n/stats\nclear\nexitt\n/nothing\nWho art thou?\r\nquit\nnot asked\n"
    code, out, err = run_chat(lines)
    first, unknown, again = out.splitlines()
    assert code == 0 and first == again != unknown and "> " not in out + err
    assert "1 answers" in err and "a new conversation" in err and "goodbye" not in err
    assert "[chat] /nothing is not a command; the commands are /clear, /stats, /quit and /exit" in err
    assert run_chat(b"Who art thou?")[1] == first + "\n"  # the last line may lack its end
    assert run_chat(b"/exit\nx")[:2] == (0, "")


def test_an_answer_has_256_tokens_at_most_by_default(run_chat):
    assert "answers of at most 256 tokens (NGEN)" in run_chat(b"", NGEN="")[2]
    assert "answers of at most 64 tokens (NGEN)" in run_chat(b"", NGEN=64)[2]


def test_a_bad_message_is_one_line_and_does_not_end_the_chat(run_chat):
    code, out, err = run_chat(b"caf\xe9\n" + b"the king " * 300 + b"\nWho art thou?\n")
    assert code == 0 and out.count("\n") == 1
    assert "[chat] the message is not valid UTF-8" in err and re.search(r"the message has \d+ tokens, CTX is 256", err)


def test_a_cut_off_answer_is_reported(run_chat):
    code, out, err = run_chat(b"Tell me of the king and of his house.\n", NGEN=3)
    assert code == 0 and len(out) > 3 and "[chat] cut off at NGEN=3; the answer stays" in err
    assert "cut off: CTX=24 is full" in run_chat(b"Tell me of the king and of his house.\n", CTX=24)[2]


def test_one_shot_equals_prompt_with_the_template(run_chat, monkeypatch, capfdbinary):
    assert run_chat(b"", "--prompt", "clear")[1].strip()  # a command is a message here
    code, out, _ = run_chat(b"not read\n", "2", "--prompt", "Who art thou?", SEED=3, TEMP=0.9)
    monkeypatch.setenv("PROMPT", "Who art thou?")
    monkeypatch.setenv("CHAT", "1")
    assert code == colibri.main([]) == 0 and capfdbinary.readouterr().out == out.encode()


def test_temperature_top_k_and_prompt_as_options(run_chat):
    """As nanochat's chat takes them; an option is stronger than its variable."""
    code, greedy, err = run_chat(b"", "-p", "Who art thou?", "-t", "0", TEMP=1)
    assert code == 0 and " | greedy" in err and greedy == run_chat(b"", "--prompt", "Who art thou?", TEMP=0)[1]
    code, likeliest, err = run_chat(b"", "-p", "Who art thou?", "-t", "1.5", "-k", "1", SEED=3)
    assert likeliest == greedy and "temperature 1.5, top-k 1, nucleus 0.9, SEED=3" in err
    assert run_chat(b"", "-p", "Who art thou?", "-t", "1.5", "-k", "0", NUCLEUS=1, SEED=3)[1] != greedy


def test_variables_of_other_modes_are_reported_as_ignored(run_chat):
    code, _, err = run_chat(b"", PROMPT="x", TF=1, SCORE="no-file")
    assert code == 0 and re.findall(r"\[env\] (\w+) has no effect on a chat", err) == ["PROMPT", "SCORE", "TF"]


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([], {"SNAP": "bare"}, "has no chat template (chat_template.jinja), so it cannot chat"),
        ([], {"SNAP": "failing"}, "the chat template failed"),
        ([], {"SNAP": "silent"}, "the chat template makes no token of a message"),
        ([], {"SNAP": "/no/such/folder"}, "SNAP=/no/such/folder: no such folder"),
        ([], {"NGEN": "x"}, "NGEN='x'"),
        (["cap"], {}, "cap='cap'"),
        (["--prompt", " "], {}, "--prompt is empty"),
        (["-t", "warm"], {}, "argument -t/--temperature: value='warm': expected a number from 0"),
        (["-k", "-1"], {}, "argument -k/--top-k: "),
        (["--nothing"], {}, "unrecognized arguments: --nothing"),
        (["--prompt", "caf\udce9"], {}, "--prompt is not valid UTF-8"),
        (["--prompt", "the king " * 200], {}, "CTX is 256; raise CTX or shorten it"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2_before_any_weight_is_read(
    run_chat, monkeypatch, tmp_path, arguments, variables, message
):
    monkeypatch.setattr("snapshot.dense.DenseTensors.load_weights", lambda *rest: pytest.fail("weights were read"))
    templates = {"bare": None, "failing": "{{ 1 / 0 }}", "silent": "{# nothing #}"}
    if variables.get("SNAP") in templates:
        template, variables = templates[variables["SNAP"]], {"SNAP": str(tmp_path / "snap"), "PREFIX": 0}
        shutil.copytree(EMBEDDED_SNAPSHOT, tmp_path / "snap")
        (tmp_path / "snap" / "chat_template.jinja").unlink()
        if template is not None:
            (tmp_path / "snap" / "chat_template.jinja").write_text(template)
    code, out, err = run_chat(b"Who art thou?\n", *arguments, **variables)
    assert code == 2 and out == ""
    [line] = [line for line in err.splitlines() if line.startswith("chat: ")]
    assert message in line and "Traceback" not in err


@pytest.mark.parametrize("ends", [EOFError, KeyboardInterrupt])
@pytest.mark.parametrize("shows_answers", [True, False])
def test_ctrl_d_and_ctrl_c_at_the_prompt_sign_end_the_input(monkeypatch, ends, shows_answers):
    """Where stdout is no terminal, lines cannot be edited, and Ctrl-D reads as an empty line without a line end."""

    def read(*sign):
        if ends is EOFError and not shows_answers:
            return ""
        raise ends

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "readline", read)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: shows_answers)
    assert chat.read_line(is_terminal=True) is None
    ends = Terminated
    with pytest.raises(Terminated):
        chat.read_line(is_terminal=True)


# --- the program as a process ----------------------------------------------------------------------------------------


@pytest.fixture
def long_answers(tmp_path):
    """Variables of a chat whose greedy answers do not end by themselves, in plain torch, which is slow enough."""
    shutil.copytree(EMBEDDED_SNAPSHOT, tmp_path / "long_answers")
    for name in ("config.json", "generation_config.json"):
        fields = read_json(EMBEDDED_SNAPSHOT / name) | {"eos_token_id": [2046]}
        (tmp_path / "long_answers" / name).write_text(json.dumps(fields))
    variables = {"SNAP": str(tmp_path / "long_answers"), "KERNELS": "reference", "NGEN": "900", "TEMP": "0"}
    return environment({"USAGE": "0", "TERM": "xterm"} | variables)


def start(environ, *arguments):
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return forker().start(list(arguments), environ, module="scripts.chat_cli", **streams)


class Keyboard:
    """A terminal that runs a program: what is typed, and what is shown."""

    def __init__(self, environ, module):
        self.primary, secondary = os.openpty()
        self.process = forker().start([], environ, module=module, terminal=os.ttyname(secondary))
        self.secondary, self.shown = secondary, b""

    def press_until(self, key, pattern):
        """Type a key until the pattern is shown -> as wait_for. Ctrl-C drops what was typed before it, and readline,
        which has seen that there is more, waits for it and handles no signals: a letter wakes it."""
        for turn in range(30):
            if turn:
                self.type(b"x")
            self.type(key)
            while not re.search(pattern, self.shown) and select.select([self.primary], [], [], 2)[0]:
                self.shown += os.read(self.primary, 4096)
            if re.search(pattern, self.shown):
                break
        return self.wait_for(pattern)

    def wait_for(self, pattern):
        """Read until the pattern is shown -> everything up to its end, which is then consumed."""
        while not (match := re.search(pattern, self.shown, re.DOTALL)):
            assert select.select([self.primary], [], [], 60)[0], (self.shown, self.process.poll())
            self.shown += os.read(self.primary, 4096)
        before, self.shown = self.shown[: match.end()], self.shown[match.end() :]
        return before

    def type(self, keys):
        os.write(self.primary, keys)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.secondary)
        os.close(self.primary)


@pytest.fixture
def keyboard(long_answers):
    """keyboard(**variables) -> a Keyboard, closed when the test ends."""
    opened = []

    def start(module="scripts.chat_cli", **variables):
        opened.append(Keyboard(long_answers | variables, module))
        return opened[-1]

    yield start
    for keyboard in opened:
        keyboard.close()


def test_a_chat_on_a_terminal(keyboard):
    """A message is corrected while typed; a stopped answer stays; Ctrl-C at the prompt sign ends the chat."""
    keyboard = keyboard()
    keyboard.wait_for(rb"Ctrl-C stops an answer.*> ")
    keyboard.type(b"Who art thoo\x7fu?\n")
    keyboard.wait_for(rb"u\?\r\n")
    keyboard.wait_for(rb"[a-z]{2,} [a-z]+")  # some words of an answer
    keyboard.type(b"\x03")
    keyboard.wait_for(rb"\[chat\] stopped; the answer stays in the conversation.*> ")
    keyboard.type(b"/stats\n")
    keyboard.wait_for(rb"\[stats\] 1 answers, \d+ tokens.*> ")
    keyboard.type(b"And thy brother?\n")
    keyboard.wait_for(rb"brother\?\r\n")
    keyboard.wait_for(rb"[a-z]{2,} [a-z]+")
    keyboard.type(b"\x03")
    keyboard.wait_for(rb"\[chat\] stopped; .*> ")
    keyboard.type(b"stats\n")
    keyboard.wait_for(rb"\[stats\] 2 answers.*> ")
    keyboard.type(b"half a mess")
    keyboard.wait_for(rb"half a mess")
    assert b"Traceback" not in keyboard.press_until(b"\x03", rb"goodbye")
    assert keyboard.process.wait(timeout=60) == 0


def test_colibri_in_a_terminal_is_the_same_chat(keyboard):
    """With CHAT=1 and no other mode; the default of NGEN is that of a chat."""
    keyboard = keyboard("colibri", CHAT="1", NGEN="")
    keyboard.wait_for(rb"answers of at most 256 tokens.*Ctrl-C stops an answer.*> ")
    keyboard.type(b"/stats\n")
    keyboard.wait_for(rb"\[stats\] 0 answers.*> ")
    keyboard.type(b"/quit\n")
    keyboard.wait_for(rb"goodbye")
    assert keyboard.process.wait(timeout=60) == 0


def test_colibri_without_a_terminal_checks_the_reference(run_colibri):
    process = run_colibri(CHAT=1)
    assert process.returncode == 0 and b"oracle: " in process.stdout


def test_one_shot_stopped_by_ctrl_c_is_130(long_answers):
    process = start(long_answers, "--prompt", "Who art thou?")
    process.stdout.read(8)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out.endswith(b"\n") and b"[chat] stopped" in err and b"Traceback" not in err


def test_sigterm_and_a_second_ctrl_c_end_the_chat(long_answers):
    process = start(long_answers)
    process.stdin.write(b"Who art thou?\n")
    process.stdin.flush()
    process.stdout.read(8)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143 and b"Traceback" not in err
    key = StopKey()
    with key:
        os.kill(os.getpid(), signal.SIGINT)
        assert key.pressed
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_closed_stdout_is_no_traceback(long_answers):
    process = start(long_answers, "--prompt", "Who art thou?")
    process.stdout.read(1)
    process.stdout.close()
    process.stdin.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 141 and b"Traceback" not in err and b"Exception ignored" not in err
