"""The whole program with streams that are closed, full or a terminal: the answer comes, and notices do not end it."""

import fcntl
import json
import os
import re
import select
import signal
import struct
import subprocess
import termios

import pytest

from modes import report
from tests.conftest import read_json
from tests.support.forked import CLOSED, environment, forker
from tests.support.screen import Screen, read_terminal

TEXT = {"USAGE": "0", "PROMPT": "In the beginning", "NGEN": "24", "TEMP": "0", "TERM": "xterm"}
COLUMNS = 80


def run(variables, module="colibri", arguments=(), **streams):
    """-> (exit code, stdout or None, stderr or None)."""
    process = forker().start(list(arguments), environment(variables), module=module, **streams)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def answer():
    code, out, _ = run(TEXT, stdout=subprocess.PIPE)
    assert code == 0
    return out


@pytest.mark.parametrize("stderr", ["full", "closed", "gone"])
def test_a_lost_stderr_does_not_end_the_run(answer, stderr):
    """PROMPT=... python colibri.py 2>/dev/full ended with 1 and without an answer."""
    if stderr == "full":
        with open("/dev/full", "wb") as full:
            code, out, _ = run(TEXT, stdout=subprocess.PIPE, stderr=full)
    elif stderr == "closed":
        code, out, _ = run(TEXT, stdout=subprocess.PIPE, stderr=CLOSED)
    else:
        reader, writer = os.pipe()
        os.close(reader)
        code, out, _ = run(TEXT, stdout=subprocess.PIPE, stderr=writer)
        os.close(writer)
    assert code == 0 and out == answer


@pytest.mark.parametrize("variables", [TEXT, {"TF": "1"}, {}, {"SERVE": "stdio"}])
def test_a_closed_stdout_is_refused_before_loading(variables):
    """PROMPT=... python colibri.py >&- showed a traceback, after the model was loaded."""
    code, _, err = run(variables, stdout=CLOSED, stderr=subprocess.PIPE)
    assert (
        code == 2 and err.decode().splitlines()[-1].startswith("colibri: stdout is closed") and b"[kernels]" not in err
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_server_of_closed_streams_ends_with_0(tmp_path, number):
    """SIGTERM after stderr was lost ended a server with 1; with stdout closed it is as good a server."""
    variables = {"SERVE": "1", "PORT": "0", "USAGE": "0", "REPORT": str(tmp_path / "r.json")}
    process = forker().start([], environment(variables), stdin=CLOSED, stdout=CLOSED, stderr=subprocess.PIPE)
    for line in process.stderr:
        if b"[serve]" in line:
            break
    process.stderr.close()
    process.send_signal(number)
    assert process.wait(timeout=60) == 0 and not read_json(tmp_path / "r.json")["interrupted"]


def test_a_pipe_server_without_stdin_ends_with_0():
    code, out, _ = run({"SERVE": "stdio", "USAGE": "0"}, stdin=CLOSED, stdout=subprocess.PIPE)
    assert code == 0 and b"READY" in out


# --- on a terminal ----------------------------------------------------------------------------------------------------


def run_on_terminal(variables, columns=COLUMNS, stdout=None, stop=None, **options):
    """-> (exit code, the Screen), stdout and stderr one terminal. stop: bytes after which SIGINT is sent."""
    primary, secondary = os.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    streams = {"stdout": secondary if stdout is None else stdout, "stderr": secondary}
    process = forker().start([], environment({"USAGE": "0", "TERM": "xterm"} | variables), **streams, **options)
    os.close(secondary)
    shown = b""
    while stop and stop not in shown:
        shown += os.read(primary, 4096)
    if stop:
        process.send_signal(signal.SIGINT)
    shown += read_terminal(primary)
    return process.wait(timeout=60), Screen(columns).feed(shown.decode())


def test_a_text_is_whole_on_a_terminal(answer):
    """The prefill's bar is gone, every line of the answer stands, and the table is not wrapped."""
    code, screen = run_on_terminal(TEXT)
    assert code == 0 and answer.decode().rstrip("\n") in screen.text and "####" not in screen.text
    assert [line for line in screen.text.split("\n") if line.startswith("[run]") and len(line) >= COLUMNS][1:] == []


def test_a_text_behind_tee_is_whole(answer):
    """stdout is a pipe to a program that shows it on the same terminal: a bar would erase what that shows."""
    reader, writer = os.pipe()
    primary, secondary = os.openpty()
    process = forker().start([], environment(TEXT), stdout=writer, stderr=secondary)
    tee = subprocess.Popen(["cat"], stdin=reader, stdout=secondary)
    for number in (reader, writer, secondary):
        os.close(number)
    screen = Screen(COLUMNS)
    screen.feed(read_terminal(primary).decode())
    assert process.wait(timeout=60) == 0 and tee.wait(timeout=60) == 0
    assert not re.search(r"decode [#.]{8}", screen.text)


@pytest.mark.parametrize("variables", [{"REPLAY": "1"}, {"TF": "1"}, {}], ids=["replay", "tf", "check"])
def test_a_report_of_a_mode_is_whole_on_a_terminal(variables):
    code, screen = run_on_terminal(variables)
    assert code == 0 and "####" not in screen.text and "[prefill]" not in screen.text
    assert re.search(r"^(REPLAY|PREFILL|oracle)", screen.text, re.MULTILINE)


SLOW = {"PROMPT": "the king " * 480, "PREFILL_CHUNK": "64", "KERNELS": "reference", "NGEN": "4"}


def test_an_interrupted_prefill_leaves_no_bar_and_no_false_numbers(tmp_path):
    """Stopped at layer 1 of 30 it reported 1,801 prompt tokens and 5,771 tok/s."""
    path = tmp_path / "r.json"
    code, screen = run_on_terminal(SLOW | {"REPORT": str(path)}, stop=b"[prefill] layer 1/5 | 64 tokens ##")
    assert code == 130 and "####" not in screen.text and "[stop] interrupted" in screen.text
    numbers = read_json(path)
    assert numbers["interrupted"] and numbers["prompt_tokens"] % 64 == 0 and numbers["prompt_tokens"] < 960
    assert numbers["tokens"] == 0 and numbers["tok_s"] is None and numbers["tokens_per_forward"] is None
    [row] = [line.split() for line in screen.lines if line.startswith("[run] prefill")]
    assert int(row[2]) == numbers["prompt_tokens"] and float(row[3]) > 0


def test_an_interrupted_replay_leaves_no_bar(tmp_path):
    ids = [1] * 900
    (tmp_path / "ref.json").write_text(json.dumps({"prompt_ids": ids, "full_ids": [*ids, 1], "tf_pred": []}))
    variables = {"REPLAY": "1", "KERNELS": "reference", "REF": str(tmp_path / "ref.json"), "PREFILL_CHUNK": "64"}
    code, screen = run_on_terminal(variables, stop=b"[prefill] layer 1/5")
    assert code == 130 and "####" not in screen.text and "REPLAY" not in screen.text


def test_heartbeats_on_a_terminal_come_between_lines(monkeypatch):
    """They broke the line that the answer was at, and erased its beginning."""
    said, now = [], 0.0
    monkeypatch.setattr(report, "say", said.append)
    monkeypatch.setattr(report.Terminal, "is_shared", True)
    monkeypatch.setattr(report.time, "perf_counter", lambda: now)
    run = object.__new__(report.RunReport)
    mark = report.CounterMark(0.0, report.CacheCounters(), 0.0, 0, {})
    run.counters, run.prefilled, run.heartbeat_at = report.DecodeCounters(tokens=20), mark, 0.0
    monkeypatch.setattr(run, "phases", lambda: (mark, mark, mark), raising=False)
    for now, is_open in ((5.0, False), (15.0, True), (16.0, False), (20.0, False), (27.0, False)):  # noqa: B007
        monkeypatch.setattr(report.Terminal, "is_answer_open", is_open)
        run.on_token()
    assert len(said) == 2 and run.heartbeat_at == 27.0


def test_both_streams_in_one_file(answer, tmp_path):
    """PROMPT=... python colibri.py >log 2>&1: the heartbeat stood in the middle of a line of the answer."""
    with open(tmp_path / "log", "wb") as log:
        code, _, _ = run(TEXT | {"NGEN": "40"}, stdout=log, stderr=log)
    assert code == 0 and answer.rstrip(b"\n") in (tmp_path / "log").read_bytes()


def test_a_chat_is_whole_on_a_terminal():
    """Prefill bars, answers and notices of a chat, as the terminal shows them in the end."""
    primary, secondary = os.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    question, variables = "And what of the king, " * 12, {"USAGE": "0", "TERM": "xterm", "TEMP": "0", "NGEN": "24"}
    asked = ["--prompt", question]
    _, out, _ = run(variables, "scripts.chat_cli", asked, stdout=subprocess.PIPE)
    process = forker().start([], environment(variables), module="scripts.chat_cli", terminal=os.ttyname(secondary))
    shown = b""
    for sign, keys in ((rb"> ", question.encode()), (rb"\n(\x1b\[\?2004h)?> ", b"/stats"), (rb"\[stats.*> ", b"/quit")):
        seen = len(shown)
        while not re.search(sign, shown[seen:], re.DOTALL):
            assert select.select([primary], [], [], 60)[0], shown
            shown += os.read(primary, 4096)
        os.write(primary, keys + b"\n")
    os.close(secondary)
    screen = Screen(COLUMNS).feed((shown + read_terminal(primary)).decode())
    assert process.wait(timeout=60) == 0
    assert out.decode().strip() in screen.text
    assert "[prefill]" not in screen.text and "####" not in screen.text
    assert screen.lines[-1] == "goodbye" and "[stats] 1 answers" in screen.text
