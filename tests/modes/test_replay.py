"""REPLAY and REPORT: their numbers agree with each other. No speed is asserted."""

import inspect
import itertools
import json
import os
import re

import pytest

import colibri
from forward.profile import STAGES
from generate.sampler import Sampler
from kernels import reference
from settings import EMBEDDED_SNAPSHOT
from tests.conftest import ORACLES, ROOT, read_json
from text.detokenizer import Detokenizer

REFERENCE = read_json(EMBEDDED_SNAPSHOT / "ref_glm.json")
NUM_PROMPT, NUM_FULL = len(REFERENCE["prompt_ids"]), len(REFERENCE["full_ids"])


def documented_keys():
    text = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    table = [row.split("|")[1] for row in text.splitlines() if row.startswith("| ") and "| meaning" not in row]
    return {key.strip() for cell in table for key in cell.split(",")}


def test_replay_prints_its_lines_and_counts_the_decode_alone(run_colibri, tmp_path):
    process = run_colibri("1", REPLAY=1, REPORT=tmp_path / "r.json", LOOKAHEAD=0)
    assert process.returncode == 0, process.stderr
    first, prefill, disk = process.stdout.decode().splitlines()
    n = NUM_FULL - NUM_PROMPT
    assert re.fullmatch(rf"REPLAY decode: {n} token in [\d.]+ s \| [\d.]+ tok/s \| expert hit [\d.]+%", first)
    assert re.fullmatch(rf"REPLAY prefill: {NUM_PROMPT - 1} token in [\d.]+ s \| [\d.]+ tok/s \| [\d.]+ GB", prefill)
    assert re.fullmatch(r"REPLAY disk: [\d.]+ MB a token \| [\d.]+ GB/s while reading", disk)
    report = read_json(tmp_path / "r.json")
    assert report["tokens"] == report["argmax_equal"] == n
    # one expert slot a layer: of the 4 experts that each of 4 layers requests, at most one is cached
    assert report["hits"] + report["misses"] == n * 4 * 4 and report["misses"] >= n * 4 * 3
    assert report["expert_bytes_read"] == report["misses"] * 3 * 64 * 192 * 2
    assert report["tok_s"] == pytest.approx(n / report["decode_s"], rel=1e-6)
    assert f"| {report['tok_s']:.2f} tok/s |" in first  # the printed number is the reported one


def test_replay_of_a_full_cache_reads_nothing_twice(run_colibri, tmp_path):
    run_colibri(REPLAY=1, REPORT=tmp_path / "r.json")
    report = read_json(tmp_path / "r.json")
    experts = 24 * 4
    assert report["prefill_expert_bytes_read"] + report["expert_bytes_read"] <= experts * 3 * 64 * 192 * 2


@pytest.mark.parametrize("name", ORACLES)
def test_replay_on_every_fixture(run_colibri, oracle_folder, name):
    process = run_colibri("2", REPLAY=1, SNAP=oracle_folder(name))
    assert process.returncode == 0 and process.stdout.startswith(b"REPLAY decode: 24 token in ")


@pytest.mark.parametrize("change", [{"prompt_ids": [5]}, {"full_ids": REFERENCE["prompt_ids"]}])
def test_a_reference_too_short_for_replay_is_refused(run_colibri, tmp_path, change):
    (tmp_path / "ref.json").write_text(json.dumps(REFERENCE | change))
    process = run_colibri(REPLAY=1, REF=tmp_path / "ref.json")
    assert process.returncode == 2 and b"REPLAY needs two prompt_ids" in process.stderr


@pytest.mark.parametrize("mode", ["prompt", "tf", "oracle", "replay", "score"])
def test_a_report_holds_every_documented_number(run_colibri, tmp_path, mode):
    (tmp_path / "requests.txt").write_text("2 1 5 6 7\n")
    variables = {
        "prompt": {"PROMPT": "And God said", "NGEN": 12},
        "tf": {"TF": 1},
        "oracle": {},
        "replay": {"REPLAY": 1},
        "score": {"SCORE": tmp_path / "requests.txt"},
    }[mode]
    process = run_colibri(REPORT=tmp_path / "r.json", **variables)
    assert process.returncode == 0, process.stderr
    report = read_json(tmp_path / "r.json")
    assert documented_keys() <= set(report) and report["mode"] == mode
    assert report["model"] == "tiny" and report["lossy"] == []
    assert report["cache_slots"] == (5 if mode in ("prompt", "oracle") else 4) * 24  # the MTP layer drafts
    assert 0 < report["rss_bytes"] <= report["peak_rss_bytes"] * 1.01 < report["budget_bytes"]
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".partial")] == []
    assert all(seconds >= 0 for seconds in report["profile"].values())
    assert report["drives"] == [{"mode": "buffered", "depth": 4, "bytes_s": None, "best_bytes_s": None}]  # small


def test_every_operation_is_in_a_measured_stage(monkeypatch, tmp_path):
    """A stage that is not measured would count as rest. The clock shows how many operations ran, so load by others is
    no matter."""
    ticks = itertools.count()
    now = 0

    def counted(operation):
        def run(*args, **options):
            nonlocal now
            now = next(ticks)
            return operation(*args, **options)

        return run

    operations = [(reference, name) for name, _ in inspect.getmembers(reference, inspect.isfunction)]
    for owner, name in [*operations, (Sampler, "sample"), (Detokenizer, "add_token")]:
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    monkeypatch.setattr("time.perf_counter", lambda: float(now))
    variables = dict(KERNELS="reference", USAGE="0", PROMPT="And God said", NGEN="20", SEED="1")
    monkeypatch.setenv("REPORT", str(tmp_path / "r.json"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert colibri.main([]) == 0
    profile = read_json(tmp_path / "r.json")["profile"]
    assert all(profile[stage] > 0 for stage in STAGES)
    assert profile["rest"] < 0.1 * sum(profile.values()), profile


def test_a_report_that_cannot_be_written_is_refused_first(run_colibri, tmp_path):
    for path, message in [(tmp_path / "absent" / "r.json", b"its folder does not exist"), (tmp_path, b"is a folder")]:
        process = run_colibri(REPORT=path, PROMPT="x")
        assert process.returncode == 2 and message in process.stderr and process.stdout == b""


def test_a_report_never_replaces_a_pipe_or_a_link(run_colibri, tmp_path):
    """REPORT=/dev/null once became a regular file."""
    (tmp_path / "target.json").write_text("old")
    (tmp_path / "link.json").symlink_to("target.json")
    run_colibri(REPORT=tmp_path / "link.json", PROMPT="x", NGEN=1)
    assert (tmp_path / "link.json").is_symlink() and read_json(tmp_path / "target.json")["mode"] == "prompt"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    process = run_colibri(REPORT=tmp_path / "pipe", PROMPT="x", NGEN=1)
    assert process.returncode == 0, process.stderr
    assert json.loads(os.read(reader, 1 << 16))["mode"] == "prompt" and (tmp_path / "pipe").is_fifo()
    os.close(reader)


# --- lossy switches ---------------------------------------------------------------------------------------------------


def test_fewer_experts_are_announced_and_requested(run_colibri, tmp_path):
    counts = {}
    for name, variables in {"all": {}, "TOPK=2": {"TOPK": 2}, "TOPP=0.5": {"TOPP": 0.5}}.items():
        process = run_colibri(REPLAY=1, REPORT=tmp_path / "r.json", **variables)
        report = read_json(tmp_path / "r.json")
        counts[name] = report["hits"] + report["misses"]
        num_notices = process.stderr.decode().count("[lossy]")
        assert num_notices == len(report["lossy"]) == bool(variables)
        if variables:
            assert report["lossy"][0].startswith(name)
    n = NUM_FULL - NUM_PROMPT
    assert counts["all"] == n * 16 and counts["TOPK=2"] == n * 8 and n * 4 <= counts["TOPP=0.5"] < n * 16


def test_switches_that_reduce_nothing_are_not_lossy(load):
    for variables in ({"TOPK": 4}, {"TOPK": 99}, {"TOPP": 1}, {"TOPK": 0, "TOPP": 0}):
        assert load(EMBEDDED_SNAPSHOT, **variables).lossy == {}


def test_topp_keeps_the_fewest_experts_that_reach_the_mass():
    import torch

    from kernels.reference import route

    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]])
    logits = torch.logit(scores)
    for mass, kept in [(0.3, [1, 2]), (0.41, [2, 2]), (0.72, [3, 3]), (0.95, [4, 4]), (0.0, [4, 4])]:
        _, weights = route(logits, torch.zeros(4), 4, 1, 1, True, 1.0, mass)
        assert (weights > 0).sum(-1).tolist() == kept
        assert weights.sum(-1).tolist() == pytest.approx([1.0, 1.0])
    _, weights = route(logits, torch.zeros(4), 4, 1, 1, True, 1.0, 1e-300)
    assert (weights > 0).sum(-1).tolist() == [1, 1]  # the best expert stays
    first = route(logits, torch.zeros(4), 4, 1, 1, False, 1.0, 0.5)[1][1]
    assert first.nonzero()[:, 0].tolist() == [0, 1]  # ties: lowest id


def test_route_trace_holds_every_request_of_the_run(run_colibri, tmp_path):
    from experts.route_trace import read_trace

    trace = tmp_path / "trace.jsonl"
    process = run_colibri(REPLAY=1, ROUTE_TRACE=trace)
    assert process.returncode == 0, process.stderr
    header, events = read_trace(trace)
    report = dict(zip(("layer", "rows", "uses"), events[0], strict=True))
    assert header["num_experts"] == 24 and report["layer"] == header["layers"][0] and report["rows"] > 1
    assert all(len(uses) == header["top_k"] for _, rows, uses in events if rows == 1)
    bad = run_colibri(REPLAY=1, ROUTE_TRACE=tmp_path)
    assert bad.returncode == 2 and b"cannot be written as a route trace" in bad.stderr
