"""Modes as processes: stdout, stderr and exit codes."""

import json
import os
import shutil
import signal
import subprocess

import pytest

from settings import EMBEDDED_SNAPSHOT
from tests.conftest import FIXTURES, ORACLES, read_json, write_fused
from tests.support.forked import environment, forker, start_colibri
from tests.support.pipe import frame
from tests.support.screen import read_terminal


def text_of(process):
    return process.stdout.decode("utf-8"), process.stderr.decode("utf-8")


# --- the check against the reference ----------------------------------------------------------------------------------


def test_the_embedded_model_equals_transformers(run_colibri):
    process = run_colibri()
    out, err = text_of(process)
    reference = read_json(EMBEDDED_SNAPSHOT / "ref_glm.json")
    n = len(reference["full_ids"]) - len(reference["prompt_ids"])
    assert process.returncode == 0, err
    assert out.endswith(f"oracle: {n}/{n} tokens equal\n")
    assert "SNAP is not set: models/tiny" in err


@pytest.mark.parametrize("mode", ["oracle", "tf"])
def test_one_wrong_id_is_exit_1(run_colibri, tmp_path, mode):
    reference = read_json(EMBEDDED_SNAPSHOT / "ref_glm.json")
    key = "full_ids" if mode == "oracle" else "tf_pred"
    reference[key][-1] = (reference[key][-1] + 1) % 2048
    (tmp_path / "ref.json").write_text(json.dumps(reference))
    process = run_colibri(REF=tmp_path / "ref.json", **({"TF": 1} if mode == "tf" else {}))
    out, err = text_of(process)
    assert process.returncode == 1
    n = len(reference["full_ids"])
    if mode == "oracle":
        m = n - len(reference["prompt_ids"])
        assert f"oracle: {m - 1}/{m} tokens equal" in out and f"first difference at position {n - 1}" in out
    else:
        assert f"PREFILL (teacher-forcing): {n - 1}/{n} positions equal" in out and f"position {n - 1}:" in err


@pytest.mark.parametrize(
    ("name", "fused"),
    [(name, fused) for name in ORACLES for fused in (False, True) if not (fused and name == "glm_moe_dsa_fp8")],
)  # FP8 is published unfused
def test_check_and_tf_on_every_fixture(run_colibri, oracle_folder, tmp_path, name, fused):
    folder = write_fused(oracle_folder(name), tmp_path / "fused") if fused else oracle_folder(name)
    check, tf = run_colibri(SNAP=folder), run_colibri("2", SNAP=folder, TF=1)
    assert check.returncode == tf.returncode == 0, check.stderr + tf.stderr
    assert text_of(check)[0].endswith("oracle: 24/24 tokens equal\n")
    assert "PREFILL (teacher-forcing): 36/36 positions equal" in text_of(tf)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tf_pred": None}, "tf_pred is missing"),
        ({"tf_pred": [1]}, "tf_pred has 1 entries for"),
        ({"full_ids": []}, "full_ids is empty"),
        ({"full_ids": [1, 9999]}, "full_ids[1]=9999: expected a whole number from 0 to 2047"),
        ({"full_ids": [1, "x"]}, "full_ids[1]='x': expected a whole number"),
    ],
)
def test_a_bad_reference_is_refused(run_colibri, tmp_path, change, message):
    reference = read_json(EMBEDDED_SNAPSHOT / "ref_glm.json") | change
    (tmp_path / "ref.json").write_text(json.dumps({k: v for k, v in reference.items() if v is not None}))
    process = run_colibri(TF=1, REF=tmp_path / "ref.json")
    assert process.returncode == 2 and message in text_of(process)[1]
    assert process.stdout == b""


@pytest.mark.parametrize("mode", ["TF", "REPLAY"])
def test_a_mode_without_its_reference_names_the_file(run_colibri, tmp_path, mode):
    shutil.copytree(FIXTURES / "glm_moe_dsa", tmp_path / "snap")
    (tmp_path / "snap" / "ref_glm.json").unlink()
    process = run_colibri(SNAP=tmp_path / "snap", **{mode: 1})
    assert process.returncode == 2 and "ref_glm.json: no such file; REF must name" in text_of(process)[1]


def test_help(run_colibri):
    process = run_colibri("--help")
    assert process.returncode == 0 and process.stdout.startswith(b"usage: ")


def test_neither_mode_nor_reference_prints_the_usage(run_colibri, tmp_path):
    shutil.copytree(FIXTURES / "glm_moe_dsa", tmp_path / "snap")
    (tmp_path / "snap" / "ref_glm.json").unlink()
    process = run_colibri(SNAP=tmp_path / "snap")
    assert process.returncode == 2 and "usage:" in text_of(process)[1] and process.stdout == b""


# --- PROMPT -----------------------------------------------------------------------------------------------------------


def test_stdout_is_the_completion_alone(run_colibri):
    process = run_colibri(PROMPT="In the beginning", TEMP=0, NGEN=20)
    out, err = text_of(process)
    assert process.returncode == 0 and "In the beginning" not in out and out.endswith("\n")
    assert sum(c.isalpha() for c in out) > 20 and "[" not in out
    for part in (
        "[snapshot]",
        "[plan]",
        "[prompt]",
        "[t=16 ",
        "[stop] NGEN=20 reached",
        "[run]",
        "PROFILE: expert-disk",
    ):
        assert part in err
    again = run_colibri("1", PROMPT="In the beginning", TEMP=0, NGEN=20, PREFILL_CHUNK=2)
    assert again.stdout == process.stdout


def test_the_greedy_text_is_the_reference(run_colibri):
    """PROMPT adds the prefix, encodes and decodes as the reference does."""
    from tokenizers import Tokenizer

    reference = read_json(EMBEDDED_SNAPSHOT / "ref_glm.json")
    tokenizer = Tokenizer.from_file(str(EMBEDDED_SNAPSHOT / "tokenizer.json"))
    prompt, full = reference["prompt_ids"], reference["full_ids"]
    text = tokenizer.decode(prompt[2:], skip_special_tokens=False)
    expected = tokenizer.decode(full[len(prompt) :], skip_special_tokens=False)
    process = run_colibri(PROMPT=text, TEMP=0, NGEN=len(full) - len(prompt))
    assert text_of(process)[0] == expected + "\n"


def test_the_seed_decides_the_text(run_colibri):
    runs = [run_colibri(PROMPT="And he said", SEED=seed, NGEN=24).stdout for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_the_prefix_can_be_turned_off_and_is_not_doubled(run_colibri):
    plain = text_of(run_colibri(PROMPT="The king", NGEN=1))[1]
    bare = text_of(run_colibri(PROMPT="The king", NGEN=1, PREFIX=0))[1]
    given = text_of(run_colibri(PROMPT="[gMASK]<sop>The king", NGEN=1))[1]

    def count(err):
        return int(err.split("[prompt] ")[1].split()[0])

    assert count(plain) == count(given) == count(bare) + 2


def test_chat_uses_the_template(run_colibri):
    process = run_colibri(PROMPT="Who art thou?", CHAT=1, TEMP=0, NGEN=30)
    assert process.returncode == 0
    raw = run_colibri(PROMPT="[gMASK]<sop><|user|>Who art thou?<|assistant|><think></think>", TEMP=0, NGEN=30)
    assert process.stdout == raw.stdout != run_colibri(PROMPT="Who art thou?", TEMP=0, NGEN=30).stdout


def test_a_declared_stop_id_ends_the_text_and_is_not_printed(run_colibri, tmp_path):
    """The second of three declared ids stops as well as the first, from config.json or generation_config.json."""
    folder = tmp_path / "snap"
    shutil.copytree(EMBEDDED_SNAPSHOT, folder)
    reference = read_json(folder / "ref_glm.json")
    prompt, full = reference["prompt_ids"], reference["full_ids"]
    stop = full[len(prompt) + 5]
    before = full[len(prompt) : full.index(stop, len(prompt))]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for name in ("config.json", "generation_config.json"):
        fields = read_json(EMBEDDED_SNAPSHOT / name) | {"eos_token_id": [2047, stop, 2046]}
        (folder / name).write_text(json.dumps(fields))
        text = tokenizer.decode(prompt[2:], skip_special_tokens=False)
        process = run_colibri(SNAP=folder, PROMPT=text, TEMP=0, NGEN=40)
        out, err = text_of(process)
        assert out == tokenizer.decode(before, skip_special_tokens=False) + "\n" and "[stop] stop token" in err
        shutil.copy(EMBEDDED_SNAPSHOT / name, folder)


def test_ctx_bounds_prompt_and_answer(run_colibri):
    fits = run_colibri(PROMPT="[gMASK]<sop>" + "the " * 29, CTX=32, NGEN=50, TEMP=0)
    assert fits.returncode == 0
    n = int(text_of(fits)[1].split("[prompt] ")[1].split()[0])
    assert f"at most {32 - n + 1} more" in text_of(fits)[1]
    exactly = run_colibri(PROMPT="[gMASK]<sop>" + "the " * 29, CTX=n, NGEN=50, TEMP=0)
    assert exactly.returncode == 0 and "at most 1 more" in text_of(exactly)[1]
    beyond = run_colibri(PROMPT="[gMASK]<sop>" + "the " * 29, CTX=n - 1)
    assert beyond.returncode == 2 and f"PROMPT has {n} tokens, CTX is {n - 1}" in text_of(beyond)[1]


@pytest.mark.parametrize("bits", ["8", "4"])
def test_quantizing_at_load_is_announced_and_generates(run_colibri, bits):
    process = run_colibri("0", bits, bits, PROMPT="In the beginning", TEMP=0, NGEN=16)
    out, err = text_of(process)
    assert process.returncode == 0 and err.count(f"quantized to {bits} bits") == 2 and len(out) > 16


def test_non_ascii_prompts_under_the_c_locale(run_colibri):
    process = run_colibri(PROMPT="Où est le café? 😀", NGEN=8, LANG="C", LC_ALL="C", PYTHONUTF8="0")
    assert process.returncode == 0, process.stderr
    text_of(process)


def generating():
    """A process in the middle of a long text; plain torch, so that it does not end before the signal."""
    text = {"USAGE": "0", "PROMPT": "In the beginning", "NGEN": "900", "SEED": "1", "KERNELS": "reference"}
    process = forker().start([], environment(text), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(20)
    return process


def test_ctrl_c_ends_cleanly_with_the_statistics():
    process = generating()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"[stop] interrupted" in err and b"[run]" in err and b"PROFILE" in err and b"Traceback" not in err
    assert out.endswith(b"\n")


def test_sigterm_ends_as_ctrl_c_does():
    process = generating()
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143 and b"[run]" in err and b"Traceback" not in err


def test_a_text_on_a_terminal_is_not_cut_by_the_heartbeat(run_colibri):
    """stdout and stderr are one terminal: the whole text is uninterrupted, the statistics follow it."""
    primary, secondary = os.openpty()
    variables = {"PROMPT": "In the beginning", "NGEN": "40", "TEMP": "0", "TERM": "xterm"}
    process = forker().start([], environment({"USAGE": "0"} | variables), stdout=secondary, stderr=secondary)
    os.close(secondary)
    shown = read_terminal(primary).decode().replace("\r\n", "\n")
    assert process.wait(timeout=60) == 0
    out, err = text_of(run_colibri(**variables))
    assert out in shown and "[t=16 " not in shown and "[t=16 " in err and "[run]" in shown


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=["bar", "no-color", "dumb"])
def test_a_bar_on_a_terminal_and_plain_lines_elsewhere(variables):
    """stderr is a pseudo-terminal here: a bar is shown and wiped, without color; a dumb terminal gets lines."""
    primary, secondary = os.openpty()
    text = {"USAGE": "0", "PROMPT": "one two three four five six", "NGEN": "2", "TERM": "xterm"}
    process = forker().start([], environment(text | variables), stdout=subprocess.PIPE, stderr=secondary)
    os.close(secondary)
    shown = read_terminal(primary)
    process.communicate(timeout=60)
    assert process.returncode == 0 and b"\x1b[3" not in shown
    assert (b"\r[prefill] layer 1/5" in shown) == (variables.get("TERM") != "dumb")
    assert (b"\x1b" in shown) == (variables.get("TERM") != "dumb")


@pytest.mark.parametrize("variables", [{"PROMPT": "In the beginning", "NGEN": "600"}, {"TF": "1"}, {"REPLAY": "1"}, {}])
def test_a_closed_stdout_is_no_traceback(variables):
    """PROMPT=... python colibri.py | head -c 1; TF=1 python colibri.py | true"""
    start = start_colibri if "PROMPT" in variables else forker().start
    environ = environment({"USAGE": "0"} | variables)
    process = start([], environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if "PROMPT" in variables:
        process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 141 and b"Traceback" not in err and b"Exception ignored" not in err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("variables", [{"PROMPT": "x", "NGEN": "4"}, {"TF": "1"}])
def test_a_full_disk_behind_stdout_is_one_line(variables):
    with open("/dev/full", "wb") as full:
        environ = environment({"USAGE": "0"} | variables)
        process = forker().start([], environ, stdout=full, stderr=subprocess.PIPE)
        _, err = process.communicate()
    assert process.returncode == 2 and b"colibri: No space left on device" in err
    assert b"Traceback" not in err and b"Exception ignored" not in err


def test_ctrl_c_during_the_prefill():
    variables = {"USAGE": "0", "PROMPT": "the king " * 480, "PREFILL_CHUNK": "8", "KERNELS": "reference"}
    process = forker().start([], environment(variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for line in process.stderr:
        if line.startswith(b"[prefill]"):
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and b"[stop] interrupted" in err and b"Traceback" not in err


def test_experts_that_topp_drops_are_visible(run_colibri, tmp_path):
    """With TOPP nothing said how many experts a token still used."""
    active = {}
    for topp in (0, 0.5):
        process = run_colibri(PROMPT="In the beginning", NGEN=8, TEMP=0, TOPP=topp, REPORT=tmp_path / "r.json")
        [head, _, decode] = [line for line in process.stderr.decode().splitlines() if line.startswith("[run] ")][:3]
        active[topp] = read_json(tmp_path / "r.json")["active_experts"]
        column = decode[: head.index("active") + len("active")].split()[-1]
        assert abs(float(column) - active[topp]) < 1, (head, decode, active)
    top_k = read_json(EMBEDDED_SNAPSHOT / "config.json")["num_experts_per_tok"]
    assert active[0] == top_k and 1 <= active[0.5] < top_k - 0.5


def test_every_mode_reports_the_prefill_by_one_rule(tmp_path):
    """SCORE said nothing for 10 s, SERVE=stdio nothing at all: a line for every fourth layer and the last."""
    (tmp_path / "requests.txt").write_text("9 1 " + " ".join(map(str, range(5, 15))) + "\n")
    prompt = frame("In the beginning God created the heaven and the earth")
    for variables, stdin in (({"SCORE": str(tmp_path / "requests.txt")}, b""), ({"SERVE": "stdio"}, prompt)):
        environ = environment({"USAGE": "0", "THREADS": "1"} | variables)
        process = forker().start([], environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        _, err = process.communicate(stdin, timeout=60)
        lines = [line for line in err.decode().splitlines() if line.startswith("[prefill] ")]
        assert [line.split(" | ")[0] for line in lines] == ["[prefill] layer 4/5", "[prefill] layer 5/5"], err


# --- bad usage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([], {"SNAP": "/no/such/folder", "PROMPT": "x"}, "SNAP=/no/such/folder: no such folder"),
        ([], {"SNAP": "/no/such/folder"}, "SNAP=/no/such/folder: no such folder"),
        ([], {"SNAP": "x" * 5000, "PROMPT": "x"}, "File name too long"),
        ([], {"SNAP": "/no/\u00e9", "PROMPT": "x", "LC_ALL": "C", "PYTHONUTF8": "0"}, "no such folder"),
        ([], {"SNAP": "", "NGEN": "x"}, "NGEN='x'"),
        ([], {"PROMPT": ""}, "PROMPT is empty"),
        (["cap"], {"PROMPT": "x"}, "cap='cap'"),
        ([], {"PROMPT": "x", "RAM_GB": "0.05"}, "need 0."),
        ([], {"SERVE": "1", "HOST": "0.0.0.0"}, "set API_KEY"),
        ([], {"SCORE": "/no/requests.txt"}, "SCORE=/no/requests.txt: No such file"),
        ([], {"REF": "/no/ref.json"}, "/no/ref.json: no such file"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(run_colibri, arguments, variables, message):
    process = run_colibri(*arguments, **variables)
    out, err = text_of(process)
    assert process.returncode == 2 and out == ""
    [line] = [line for line in err.splitlines() if line.startswith("colibri: ")]
    assert message in line and "Traceback" not in err


@pytest.mark.parametrize(
    "variables", [{"PROMPT": "the " * 100, "CTX": 16}, {"SCORE": "bad"}, {"TF": 1, "REF": "bad"}, {"REF": "bad"}]
)
def test_bad_input_is_refused_before_any_weight_is_read(monkeypatch, tmp_path, capsys, variables):
    """With a model of hundreds of GB the weights are minutes away."""
    import colibri

    (tmp_path / "bad").write_text("{}")
    variables = {k: str(tmp_path / "bad") if v == "bad" else str(v) for k, v in variables.items()}
    monkeypatch.setattr("snapshot.dense.DenseTensors.load_weights", lambda *rest: pytest.fail("weights were read"))
    monkeypatch.setattr("signal.signal", lambda *rest: None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert colibri.main([]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("colibri: ")


def test_it_runs_from_any_folder_and_writes_nothing(run_colibri, tmp_path):
    before = sorted(EMBEDDED_SNAPSHOT.iterdir())
    assert run_colibri(PROMPT="x", NGEN=2, cwd=tmp_path, is_new=True).returncode == 0
    assert not list(tmp_path.iterdir()) and sorted(EMBEDDED_SNAPSHOT.iterdir()) == before
