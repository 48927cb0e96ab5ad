"""bench/peers.py with stand-ins for the peers' programs: order of the runs, rows, ratios within rounds, refusals."""

import csv
import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest

from bench import peers
from bench.peers import main, make_parser, plan_tests, show
from bench.side_by_side import arms
from bench.side_by_side.arms import OURS, Files, SpeedTest
from bench.side_by_side.gguf_file import plan_tensors, write_gguf
from bench.side_by_side.table import COLUMNS, print_tables, ratios
from dev import make_synthetic
from errors import Refused
from settings import EMBEDDED_SNAPSHOT
from tests.support.forked import environment, forker

LLAMA = """#!{python}
import json, os, sys
if "--help" in sys.argv:
    print("usage: llama-bench {help}")
    sys.exit()
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open({log!r}, "a") as file:
    print(json.dumps(dict(words=words, snap=os.environ.get("SNAP"), group=os.environ.get("GROUP"))), file=file)
if words["-d"] == {fails_at!r}:
    print("ggml: out of memory", file=sys.stderr)
    sys.exit(1)
prompt, gen, depth = (int(words[name]) for name in ("-p", "-n", "-d"))
speed = 40.0 if words.get("-lm", words.get("-mmp")) in ("none", "0") else 20.0
one = dict(build_commit="abc123", build_number=77, n_prompt=prompt, n_gen=gen, n_depth=depth, avg_ts=speed)
print(json.dumps([one]))
"""
C_ENGINE = """#!{python}
import json, os, sys
reference = json.load(open(os.environ["REF"]))
assert os.environ["REPLAY"] == "1" and os.environ["DRAFT"] == "0" and sys.argv[1:] == ["64", "16"]
count = len(reference["full_ids"]) - len(reference["prompt_ids"])
hit = os.environ["HIT"]
print(f"loaded\\nREPLAY decode: {{count}} token in 4.00 s | {{count / 4:.2f}} tok/s | expert hit {{hit}}%")
"""


@pytest.fixture
def program(tmp_path):
    """program(text, **values) -> the path of a Python program."""

    def write(text, name, **values):
        path = tmp_path / name
        path.write_text(text.format(python=sys.executable, log=str(tmp_path / "log"), **values))
        path.chmod(0o755)
        return path

    return write


@pytest.fixture
def llama(program):
    def write(name="llama-bench", help="--load-mode --repack", fails_at=None):
        return program(LLAMA, name, help=help, fails_at=fails_at)

    return write


@pytest.fixture
def bench(monkeypatch, tmp_path, capsys):
    """bench(*options) -> exit code, lines on stdout and stderr, rows of the CSV.

    Of models/tiny, and a file as its GGUF. Our engine runs in forks."""
    real = arms.run_process
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(peers, "measure_bandwidth", lambda threads: (30e9, "plain read"))
    monkeypatch.setenv("SNAP", str(EMBEDDED_SNAPSHOT) + "/.")
    monkeypatch.setenv("KERNELS", "reference")  # or each test compiles

    def run_process(command, variables, group):
        if command[0] != sys.executable:
            return real(command, variables, group)
        environ = environment({name: str(value) for name, value in variables.items()})
        module = {arms.ENGINE.name: "bench.side_by_side.engine", "colibri.py": "colibri"}[os.path.basename(command[1])]
        streams = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with forker().start(command[2:], environ, module=module, **streams) as process:
            out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        return out.decode()

    monkeypatch.setattr(arms, "run_process", run_process)

    def run(*options):
        path = tmp_path / "rows.csv"
        path.unlink(missing_ok=True)
        code = main(["--csv", str(path), "--gguf", str(tmp_path / "tiny.gguf"), *map(str, options)])
        out, err = capsys.readouterr()
        with open(path, newline="") if path.exists() else open(os.devnull) as file:
            return code, out.splitlines(), err.splitlines(), list(csv.DictReader(file))

    return run


def read_log(tmp_path):
    return [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]


def test_rounds_by_turns(bench, llama, tmp_path, monkeypatch):
    """Every run is a row, every other round goes the other way, and long tests are in the first alone, without mmap."""
    monkeypatch.setattr(arms, "LONG", 20)
    options = ("--rounds", 2, "--prompts", 5, "--depths", "0,30", "--tokens", 3, "--threads", 1)
    code, out, err, rows = bench("--llama-bench", llama(), *options)
    assert code == 0, err
    assert list(rows[0]) == list(COLUMNS)
    short = [OURS, "llama.cpp, repacked", "llama.cpp, mmap"]
    assert [row["arm"] for row in rows if row["round"] == "1"] == [*short * 2, *short[:2]]
    assert [row["arm"] for row in rows if row["round"] == "2"] == short[::-1] * 2
    assert {row["n_depth"] for row in rows if row["round"] == "2"} == {"0"}
    ours = [(row["n_prompt"], row["n_gen"], row["n_depth"]) for row in rows if row["arm"] == OURS]
    assert ours == [("0", "3", "0"), ("5", "0", "0"), ("0", "3", "30"), ("0", "3", "0"), ("5", "0", "0")]
    assert all(float(row["tok_s"]) > 0 and float(row["memory_gb_s"]) == 30 and row["threads"] == "1" for row in rows)
    own, repacked, mapped = rows[:3]
    assert own["hit_rate"] == "1" and own["kernels"] == "plain torch (KERNELS=reference)" and own["model"] == "tiny"
    assert repacked["tok_s"] == "40" and mapped["tok_s"] == "20" and repacked["commit"] == "abc123 (77)"
    words = read_log(tmp_path)[0]
    assert words["snap"] is None  # no variable of ours reaches a peer
    wanted = {"-m": str(tmp_path / "tiny.gguf"), "-t": "1", "-r": "1", "-lm": "none", "--repack": "1", "-n": "3"}
    assert wanted.items() <= words["words"].items()
    assert len([line for line in err if line.startswith("[round ")]) == len(rows) == 14
    assert sum(line.startswith("| warm ") for line in out) == 3


def test_a_run_that_fails_leaves_the_others(bench, llama):
    options = ("--rounds", 1, "--prompts", "", "--depths", "0,7", "--tokens", 2)
    code, out, err, rows = bench("--llama-bench", llama(fails_at="7"), *options)
    assert code == 1 and [row["arm"] for row in rows if row["n_depth"] == "7"] == [OURS]
    assert "[round 1] llama.cpp, mmap, warm decode of 2 behind 7: failed, code 1: ggml: out of memory" in err
    assert len(rows) == 4 and any(re.match(r"\| warm decode of 2 behind 7 \| [\d.]+ \|  \|  \|", line) for line in out)


def test_older_llama_bench_and_further_settings(bench, llama, tmp_path):
    options = ("--rounds", 1, "--prompts", "", "--depths", "0", "--tokens", 2, "--llama-arm", "batch=-ub 2048 -mmp 1")
    code, _, _, rows = bench("--llama-bench", llama(help="-mmp"), *options)
    assert code == 0 and rows[3]["arm"] == "llama.cpp, batch"
    assert [row["tok_s"] for row in rows[1:]] == ["40", "20", "20"]
    first, *_, last = [line["words"] for line in read_log(tmp_path)]
    assert first["-mmp"] == "0" and "--repack" not in first and last["-ub"] == "2048"


def test_cold_in_a_cgroup_and_the_c_engine(bench, llama, program, monkeypatch, tmp_path):
    """A process enters the cgroup before it begins, files leave the page cache; the C engine replays random ids."""
    group, dropped = tmp_path / "group", []
    group.mkdir()

    @contextmanager
    def memory_cgroup(num_bytes):
        assert num_bytes == 2**29
        yield group

    monkeypatch.setattr(peers, "memory_cgroup", memory_cgroup)
    monkeypatch.setattr(Files, "drop_from_page_cache", lambda files: dropped.append(files.gguf.name))
    engine = program(C_ENGINE, "glm")
    cold = ("--cold", 0.5, "--cold-tokens", 8, "--rounds", 1, "--prompts", "", "--depths", "0", "--tokens", 40)
    peer = ("--c-engine", f"{engine} 64 16", "--c-variables", "HIT=87.5")
    code, out, _, rows = bench("--llama-bench", llama(), *peer, *cold)
    assert code == 0 and dropped == ["tiny.gguf"] * 3
    found = {(row["case"], row["arm"]): row for row in rows}
    assert {arm for case, arm in found if case == "cold"} == {OURS, "llama.cpp, mmap", "C engine"}
    assert found["cold", "C engine"]["tok_s"] == "2" and found["warm", "C engine"]["tok_s"] == "10"
    assert found["cold", "C engine"]["hit_rate"] == "0.875" and float(found["cold", OURS]["tok_s"]) > 0
    assert re.fullmatch(r"\d+\n", (group / "cgroup.procs").read_text())
    assert any(line.startswith("| cold decode of 8 |") for line in out)
    monkeypatch.setattr(peers, "memory_cgroup", lambda num_bytes: nullcontext())
    code, _, err, _ = bench("--llama-bench", llama(), *cold)
    assert code == 2 and err[-1].startswith("peers: --cold: no memory cgroup can be made here")


def make_row(number, arm, speed, **changes):
    test = dict(case="warm", n_prompt="512", n_gen="0", n_depth="0")
    row = dict.fromkeys(COLUMNS, "") | test | dict(round=str(number), arm=arm, tok_s=str(speed), memory_gb_s="30")
    return row | dict(load_average="1.5", model="glm", processor="a processor", threads="2") | changes


def test_ratios_are_those_within_rounds(capsys, tmp_path):
    """A machine that became twice as slow in between does not change them; a round without one of the two has none."""
    speeds = {OURS: (30, 15, 16), "llama.cpp, mmap": (20, 10, None)}
    rows = [make_row(i, arm, x) for arm in speeds for i, x in enumerate(speeds[arm]) if x]
    test = SpeedTest("warm", prompt=512)
    assert ratios(rows, test, "llama.cpp, mmap") == [1.5, 1.5]
    print_tables(rows)
    out = capsys.readouterr().out
    assert "| warm prefill of 512 | 16.0 (15.0-30.0) | 15.0 (10.0-20.0), x 1.50 (1.50-1.50) |" in out
    assert "memory, plain read: 30.0 (30.0-30.0) GB/s" in out and "processor: a processor\n" in out

    path = tmp_path / "rows.csv"
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    assert ratios(show([path, path]), test, "llama.cpp, mmap") == [1.5, 1.5]  # the same file is the same rounds
    assert main(["--show", str(path)]) == 0 and capsys.readouterr().out == out
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    assert main(["--show", str(tmp_path / "other.csv")]) == 2
    assert "other.csv: its first line is not that of bench/peers.py" in capsys.readouterr().err


def test_the_plot_has_a_line_for_each_engine(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is for --plot alone")
    rows = [
        make_row(1, arm, 5, n_prompt="0", n_gen="4", n_depth=depth) for arm in (OURS, "x") for depth in ("0", "512")
    ]
    peers.plot(pyplot, tmp_path / "a.svg", [*rows, make_row(1, OURS, 9), make_row(1, "x", 1, case="cold")])
    assert (tmp_path / "a.svg").read_text().count("<svg") == 1


def test_tests_of_the_options():
    args = make_parser().parse_args(["--prompts", "8,4", "--depths", "", "--cold", "6", "--cold-tokens", "5"])
    assert plan_tests(args) == [
        SpeedTest("warm", prompt=4),
        SpeedTest("cold", gen=5),
        SpeedTest("warm", prompt=8),
    ]


@pytest.mark.parametrize(
    "options, what",
    [
        ((), "nothing to compare with"),
        (("--llama-bench", "{tmp}/nowhere"), "nowhere: No such file or directory; --llama-bench names"),
        (("--llama-bench", "{llama}", "--prompts", "", "--depths", ""), "no tests"),
        (("--llama-bench", "{llama}", "--gguf", "{tmp}/no.gguf"), "no.gguf: no such file"),
        (("--llama-bench", "{llama}", "--prompts", "4,x"), "--prompts"),
        (("--llama-bench", "{llama}", "--rounds", "0"), "--rounds"),
        (("--show", "{tmp}/no.csv"), "no.csv"),
    ],
)
def test_bad_input_is_one_line(bench, llama, tmp_path, options, what):
    program = llama()
    code, out, err, rows = bench(*(word.format(tmp=tmp_path, llama=program) for word in options))
    assert code == 2 and not out and not rows and len(err) == 1
    assert err[0].startswith("peers: ") and what in err[0]


def test_one_form_of_a_model_is_not_enough(bench, llama, monkeypatch):
    monkeypatch.delenv("SNAP")
    code, _, err, _ = bench("--llama-bench", llama())
    assert code == 2 and "SNAP and --gguf name two forms of one model" in err[-1]


def test_without_the_package_gguf_it_says_what_installs_it(llama, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(["--llama-bench", str(llama())]) == 2
    assert "the package gguf is missing; make bench-peers installs it" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# The GGUF

SMALL = "small --hidden 128 --moe-width 64 --experts 8 --active 2 --layers 3 --vocab 64".split()


@pytest.fixture(scope="module")
def synthetic():
    """-> options and config.json of a small model as the benchmark makes it."""
    args = make_synthetic.make_parser().parse_args([*SMALL, *peers.OPTIONS.split(), "unused"])
    return args, make_synthetic.fill_in(args)


def test_gguf_tensors_hold_every_weight_once(synthetic):
    """All parameters of the snapshot are in the file, the experts of a layer in one tensor."""
    args, config = synthetic
    assert not any(key.startswith("index_") for key in config)
    tensors = {tensor.name: tensor for tensor in plan_tensors(config, args.routing, args.seed)}
    files = make_synthetic.model_groups(config, make_synthetic.ROUTINGS[args.routing], np.random.default_rng(0))
    originals = [tensor for groups in files for group in groups for tensor in group]
    assert sum(np.prod(t.shape) for t in tensors.values()) == sum(np.prod(t.shape) for t in originals)
    assert tensors["blk.1.ffn_down_exps.weight"].shape == (8, 128, 64)
    assert tensors["blk.0.attn_k_b.weight"].shape == (2, 32, 64) and "blk.0.ffn_gate_exps.weight" not in tensors
    kinds = {name: tensor.type_name for name, tensor in tensors.items()}
    assert (
        kinds["output.weight"] == "Q8_0" and kinds["blk.1.ffn_gate_inp.weight"] == kinds["output_norm.weight"] == "F32"
    )
    assert kinds["blk.2.ffn_up_exps.weight"] == kinds["blk.0.attn_q_b.weight"] == "Q4_0"


def test_gguf_holds_the_structure_of_the_snapshot(synthetic, tmp_path):
    """Routers are equal to the last bit, and the spread of experts is that of the snapshot."""
    gguf = pytest.importorskip("gguf", reason="the package gguf is for bench/peers.py and make smollm alone")
    args, config = synthetic
    write_gguf(tmp_path / "x.gguf", config, args.routing, args.seed)
    assert os.listdir(tmp_path) == ["x.gguf"]
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    assert reader.get_field("deepseek2.expert_used_count").contents() == 2
    found = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    for tensor in plan_tensors(config, args.routing, args.seed):
        values, source = found[tensor.name], tensor.source
        assert values.shape == tensor.shape
        if source.values is not None:
            assert np.abs(values - source.values).max() <= 0.13 * np.abs(source.values).max()
            assert tensor.type_name != "F32" or np.array_equal(values, source.values)
        elif source.patch is None and not source.constant:
            assert values.std() == pytest.approx(source.spread, rel=0.1) and abs(values.mean()) < 0.1 * source.spread


def test_a_gguf_needs_whole_blocks(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", np)  # it must not come to use it
    args = make_synthetic.make_parser().parse_args([*SMALL, *peers.OPTIONS.split(), "--moe-width", "80", "unused"])
    with pytest.raises(Refused, match="has 80 columns; a GGUF needs multiples of 32"):
        write_gguf(tmp_path / "x.gguf", make_synthetic.fill_in(args), args.routing, args.seed)
