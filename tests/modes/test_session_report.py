"""REPORT of a chat and of servers: written when they end, with the numbers of all answers."""

import subprocess

import pytest

from tests.conftest import read_json
from tests.modes.test_replay import documented_keys
from tests.support.forked import environment, forker
from tests.support.server_process import COMPLETIONS, ServerProcess


@pytest.fixture
def run(tmp_path):
    """run(module, arguments, lines, **variables) -> (exit code, REPORT)."""

    def run(module, arguments=(), lines=b"", **variables):
        variables = {
            "USAGE": "0",
            "NGEN": "8",
            "TEMP": "0",
            "SEED": "7",
            "REPORT": str(tmp_path / "r.json"),
        } | variables
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = forker().start(list(arguments), environment(variables), module=module, **pipes)
        _, err = process.communicate(lines, timeout=120)
        assert b"Traceback" not in err and b"has no effect" not in err
        return process.returncode, read_json(tmp_path / "r.json")

    return run


def check(numbers, mode):
    assert documented_keys() <= set(numbers) and numbers["mode"] == mode and not numbers["interrupted"]
    assert numbers["seed"] == 7 and numbers["misses"] > 0 and numbers["experts_read_per_token"] > 0
    assert 0 < numbers["drafts_accepted"] + numbers["forwards"] <= numbers["drafts_proposed"] + numbers["forwards"]


def test_a_chat_writes_its_report(run):
    """REPORT was documented for every mode, and a chat wrote nothing."""
    code, numbers = run("scripts.chat_cli", lines=b"Who art thou?\n\nAnd thy brother?\n")
    assert code == 0
    check(numbers, "chat")
    assert numbers["answers"] == 2 and 2 <= numbers["tokens"] <= 16 and numbers["cached_tokens"] > 0
    assert numbers["tok_s"] > 0 and numbers["prefill_s"] > 0 and numbers["decode_s"] > 0


def test_one_shot_and_no_question_at_all(run):
    code, numbers = run("scripts.chat_cli", ["--prompt", "Who art thou?"])
    assert code == 0 and numbers["answers"] == 1 and numbers["prompt_tokens"] > 3
    code, numbers = run("scripts.chat_cli")
    assert code == 0 and numbers["answers"] == numbers["tokens"] == 0 and numbers["tok_s"] is None
    assert numbers["experts_read_per_token"] is None


def test_the_pipe_server_writes_its_report(run):
    text = b"Who art thou?"
    frames = b"\x02PROMPT %d 8 0 0.9 0\n%s\n" % (len(text), text) * 2
    code, numbers = run("colibri", lines=frames, SERVE="stdio")
    assert code == 0
    check(numbers, "stdio")
    assert numbers["requests"] == 2 and 2 <= numbers["tokens"] <= 16 and numbers["cached_tokens"] > 0
    assert numbers["tok_s"] is None and numbers["prefill_s"] is None


def test_the_http_server_writes_its_report(tmp_path):
    """SERVE=1 REPORT=file wrote nothing at its end."""
    server = ServerProcess(SEED=7, REPORT=tmp_path / "r.json")
    _, body, _ = server.post(COMPLETIONS, {"prompt": "Who art thou?", "max_tokens": 8, "temperature": 0})
    assert server.stop() == 0
    numbers = read_json(tmp_path / "r.json")
    check(numbers, "serve")
    assert numbers["requests"] == numbers["rows_length"] + numbers["rows_stop"] == 1
    assert numbers["prompt_tokens"] == body["usage"]["prompt_tokens"]
    assert numbers["tokens"] == body["usage"]["completion_tokens"]
