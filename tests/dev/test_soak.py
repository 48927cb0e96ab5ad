"""dev/soak.py: a minute of it passes, and each failure is reported."""

import subprocess
import sys

import pytest

from dev import soak
from settings import EMBEDDED_SNAPSHOT
from tests.conftest import ROOT


@pytest.mark.slow
def test_a_minute_of_mixed_prompts():
    """A model of 1.5 GB in 0.7 GB."""
    command = [sys.executable, str(ROOT / "dev" / "soak.py"), "--minutes", "1"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.startswith("soak: passed | ")
    assert process.stderr.count("[soak ") >= 3


# --- a round over the embedded model, in this process -----------------------------------------------------------------


def soak_tiny(capsys):
    """-> (exit code, verdict)."""
    code = soak.main(["--minutes", "0", "--snap", str(EMBEDDED_SNAPSHOT)])
    return code, capsys.readouterr().out.strip()


def test_one_round_is_always_completed(capsys):
    code, verdict = soak_tiny(capsys)
    assert code == 0 and verdict.startswith("soak: passed | rounds: 1 | "), verdict


def test_a_leaked_expert_slot_is_reported(capsys, monkeypatch):
    def check(self):
        raise AssertionError("layer 1 has 3 slots of 4")

    monkeypatch.setattr("experts.cache.ExpertCache.check", check)
    assert soak_tiny(capsys) == (1, "soak: FAILED: layer 1 has 3 slots of 4")


def test_a_different_answer_is_reported(capsys, monkeypatch):
    plain, calls = soak.Soak.complete, []
    monkeypatch.setattr(soak.Soak, "complete", lambda *rest: [*plain(*rest), len(calls.append(1) or calls)])
    code, verdict = soak_tiny(capsys)
    assert code == 1 and verdict.startswith("soak: FAILED: the "), verdict


def test_too_much_memory_is_reported(capsys, monkeypatch):
    monkeypatch.setattr(soak, "rss_bytes", lambda: 10**15)
    code, verdict = soak_tiny(capsys)
    assert code == 1 and verdict.startswith("soak: FAILED: 1000000.000 GB RSS, more than 1.05 times "), verdict


@pytest.mark.parametrize(("now", "what"), [((6, 4), "6 files are open, 5"), ((5, 7), "7 threads are open, 4")])
def test_leaks_are_reported(capsys, monkeypatch, now, what):
    counts = iter([(5, 4), now])
    monkeypatch.setattr(soak, "count_open", lambda: next(counts))
    assert soak_tiny(capsys) == (1, f"soak: FAILED: {what} were after the first round")


@pytest.mark.parametrize("minutes", ["-1", "nan", "many"])
def test_minutes_that_mean_nothing_are_refused(minutes, capsys):
    with pytest.raises(SystemExit) as error:
        soak.main(["--minutes", minutes])
    assert error.value.code == 2 and "expected a number" in capsys.readouterr().err
