"""The memory plan: what is planned, what is refused, and that the run stays within the memory budget."""

import json
import os
import re
import subprocess
import sys
from contextlib import closing

import pytest

from errors import Refused
from load.model import open_snapshot
from settings import EMBEDDED_SNAPSHOT, Settings
from snapshot.gguf_files import read_model
from tests.conftest import FIXTURES, ROOT, read_json
from tests.support.gguf_models import write_as_gguf

SNAPSHOT = FIXTURES / "glm_moe_dsa"


def test_cap_0_uses_the_whole_budget(load, monkeypatch):
    plan = load(SNAPSHOT).plan
    assert plan.num_expert_slots == 4 * plan.num_experts == 32
    [slots] = plan.expert_slots
    row = 4 * slots.slot_bytes  # one slot in every layer
    one_slot = plan.need_bytes - plan.cache_bytes + row
    rss = plan.process_bytes  # this folder has no tokenizer
    monkeypatch.setattr("load.plan.rss_bytes", lambda: rss)
    for spare, slots in [(0, 4), (0.2, 4), (1, 8), (5.5, 26), (100, 32)]:
        budget = one_slot + spare * row
        loaded = load(SNAPSHOT, RAM_GB=budget / 1e9 + 1e-9, PREFILL_CHUNK=1024)
        assert loaded.plan.num_expert_slots == slots
        assert loaded.plan.need_bytes <= loaded.plan.budget_bytes
        assert any("one expert slot per layer" in notice for notice in loaded.notices) == (slots == 4)


def test_a_model_that_does_not_fit_is_refused_with_need_and_have(load, monkeypatch):
    reads = []
    monkeypatch.setattr("snapshot.reader.FileReader.read_into", lambda *rest: reads.append(rest))
    with pytest.raises(Refused, match=r"need 0\.\d+ GB with one expert slot per layer and CTX=2048, have 0\.010 GB"):
        load(SNAPSHOT, RAM_GB=0.01)
    with pytest.raises(Refused, match=r"with cap 8 .* raise RAM_GB"):
        load(SNAPSHOT, cap=8, RAM_GB=0.01)
    assert not reads  # before anything was loaded


def test_one_expert_slot_per_layer_is_a_notice(load):
    assert any("one expert slot per layer" in notice for notice in load(SNAPSHOT, cap=1).notices)
    assert not any("one expert slot per layer" in notice for notice in load(SNAPSHOT, cap=2).notices)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_bits_shrink_the_plan_with_a_notice(load, bits):
    plain, quantized = load(SNAPSHOT).plan, load(SNAPSHOT, expert_bits=bits, dense_bits=bits)
    assert quantized.plan.dense_bytes < plain.dense_bytes
    assert quantized.plan.cache_bytes <= plain.cache_bytes
    assert sum("quantized" in notice for notice in quantized.notices) == 2


def test_ctx_is_used_with_a_notice_beyond_max_positions(load):
    loaded = load(SNAPSHOT, CTX=64)
    assert loaded.context == 64 and loaded.plan.kv_bytes == load(SNAPSHOT, CTX=128).plan.kv_bytes // 2
    assert any("beyond the 2048 positions" in notice for notice in load(SNAPSHOT, CTX=4096).notices)
    assert load(SNAPSHOT).context == 2048


def test_a_tight_budget_gets_smaller_prefill_chunks(load, monkeypatch):
    ample = load(SNAPSHOT).plan
    monkeypatch.setattr("load.plan.rss_bytes", lambda: ample.process_bytes)  # loading grows it
    assert ample.prefill_chunk == 1024
    for share, chunk in [(11, 1024), (8, 512), (1.5, 256)]:
        budget = ample.fixed_bytes + share * ample.scratch_bytes
        plan = load(SNAPSHOT, RAM_GB=budget / 1e9).plan
        assert plan.prefill_chunk == chunk and f"chunks of {chunk}" in plan.lines()[1]
        left = plan.budget_bytes - plan.fixed_bytes
        assert plan.scratch_bytes <= left / 2
        assert plan.prefill_chunk <= 256 or plan.scratch_bytes <= left / 10
    assert load(SNAPSHOT, RAM_GB=budget / 1e9, PREFILL_CHUNK=1000).plan.prefill_chunk == 1000  # set by the user, kept


def test_prefill_chunks_are_larger_where_experts_are_streamed(load):
    """A prompt of 2,000 tokens read nearly all experts twice."""
    assert load(SNAPSHOT, cap=1).plan.prefill_chunk == 4096
    assert load(SNAPSHOT, cap=8).plan.prefill_chunk == load(SNAPSHOT).plan.prefill_chunk == 1024


def test_more_memory_never_refuses_what_fitted_in_less(load, monkeypatch):
    """The prefill chunk was once halved for its share alone: a model that fitted in 15.9 GB was refused at 16.0."""
    ample, fits = load(SNAPSHOT).plan, []
    monkeypatch.setattr("load.plan.rss_bytes", lambda: ample.process_bytes)  # loading grows it
    step_bytes = (ample.scratch_bytes + ample.cache_bytes) / 40
    for step in range(1, 60):
        try:
            load(SNAPSHOT, RAM_GB=(ample.fixed_bytes + step * step_bytes) / 1e9)
            fits.append(True)
        except Refused as error:
            fits.append(False)
            need, have = re.search(r"need ([\d.]+) GB.* have ([\d.]+) GB", str(error)).groups()
            assert float(need) >= float(have)
    assert fits == sorted(fits) and True in fits and False in fits


def test_the_tokenizer_is_part_of_the_plan(load):
    with_text, size = load(EMBEDDED_SNAPSHOT).plan, (EMBEDDED_SNAPSHOT / "tokenizer.json").stat().st_size
    assert (with_text.process_bytes - 20 * size) % (64 << 20) == 0


def test_the_tokenizer_in_a_gguf_is_part_of_the_plan(load, tmp_path):
    """It has no file of its own: its size is that of what stands before the tensors."""
    path = write_as_gguf(FIXTURES / "qwen3_moe", tmp_path / "model.gguf", {"tokenizer.ggml.tokens": ["token"] * 9999})
    size = min(entry.offset for entry in read_model(path).tensors.values())
    assert size > 100_000 and (load(path).plan.process_bytes - 40 * size) % (64 << 20) == 0


@pytest.mark.parametrize("arguments", [pytest.param([], marks=pytest.mark.slow), ["2", "4", "8"]])
def test_the_script_prints_the_plan_of_the_engine(run_colibri, arguments):
    """`python scripts/plan.py models/tiny --json` and the engine's own two lines agree."""
    environ = {"PATH": os.environ["PATH"], "USAGE": "0", "RAM_GB": "1", "CTX": "512"}
    command = [sys.executable, str(ROOT / "scripts" / "plan.py"), str(EMBEDDED_SNAPSHOT), *arguments]
    script = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    printed = subprocess.run([*command, "--json"], env=environ, capture_output=True, text=True, check=True)
    engine = run_colibri(*arguments, PROMPT="x", NGEN=1, RAM_GB=1, CTX=512, is_new=True).stderr.decode()
    lines = script.stdout.splitlines()[:2]
    assert [line for line in engine.splitlines() if line.startswith("[plan]")] == lines
    plan = json.loads(printed.stdout)
    parts = ("process", "resident", "kv", "scratch", "cache")
    assert plan["need_bytes"] == sum(plan[f"{part}_bytes"] for part in parts)
    assert f"need {plan['need_bytes'] / 1e9:.3f} GB" in lines[0]
    assert f"cache: {plan['num_slots']} of 120 experts" in lines[1]
    assert [slots["layers"] for slots in plan["slots"]] == [[1, 2, 3, 4, 5]]  # the last is the MTP layer


def test_the_script_refuses_a_model_that_does_not_fit():
    environ = {"PATH": os.environ["PATH"], "USAGE": "0", "RAM_GB": "0.05"}
    command = [sys.executable, str(ROOT / "scripts" / "plan.py"), str(EMBEDDED_SNAPSHOT)]
    process = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert process.returncode == 2 and process.stderr.startswith("plan: the model does not fit in memory: need 0.")


@pytest.mark.slow
@pytest.mark.parametrize(("ram_gb", "bits"), [(0.4, 16), (0.5, 16), (1, 16), (2, 16), (0.5, 4)])
def test_rss_stays_within_the_memory_budget(run_colibri, tmp_path_factory, tmp_path, ram_gb, bits):
    """A model of 1.5 GB, 2,000 tokens of prefill and 500 of decode: RSS within 5 % of RAM_GB, or refused with need
    and have. Where every expert that is read is packed anew, 40 of decode."""
    folder = tmp_path_factory.getbasetemp() / "synthetic"
    if not folder.exists():
        script = [sys.executable, str(ROOT / "dev" / "make_synthetic.py"), "small", str(folder)]
        subprocess.run([*script, "--moe-width", "1024", "--format", "bf16", "--report-tokens", "0"], check=True)
    ref = read_json(folder / "ref_glm.json")
    if bits < 16:
        ref["full_ids"] = ref["full_ids"][: len(ref["prompt_ids"]) + 40]
    (tmp_path / "ref.json").write_text(json.dumps(ref))
    variables = dict(SNAP=folder, REPLAY=1, RAM_GB=ram_gb, REPORT=tmp_path / "r.json", REF=tmp_path / "ref.json")
    process = run_colibri(0, bits, bits, is_new=True, timeout=900, **variables)
    if process.returncode == 2:
        assert re.search(rb"need 0\.\d+ GB with one expert slot per layer .* have 0\.\d+ GB", process.stderr)
        assert ram_gb < 0.5, process.stderr
        return  # 0.4 GB is little more than the interpreter and torch
    assert process.returncode == 0, process.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["peak_rss_bytes"] <= 1.05 * ram_gb * 1e9
    assert report["tokens"] == (500 if bits == 16 else 40) and report["prompt_tokens"] == 1999


@pytest.mark.parametrize(
    ("total", "words"), [((25_200_000_000, "this machine has"), "25.200 GB that this machine has"),
                         ((4_000_000_000, "this cgroup allows"), "4.000 GB that this cgroup allows")]
)  # fmt: skip
def test_more_memory_than_there_is_counts_as_unset(load, monkeypatch, total, words):
    """RAM_GB=500 was taken on a machine of 25 GB, and planned an expert cache that would have got the run killed."""
    monkeypatch.setattr("load.plan.total_bytes", lambda: total)
    monkeypatch.setattr("load.plan.available_bytes", lambda: 3_000_000_000)
    plan = load(SNAPSHOT, RAM_GB=500).plan
    assert 0.88 * 3e9 < plan.budget_bytes < 0.88 * 5e9
    assert f"88 % of free memory; RAM_GB=500 is more than the {words}" in plan.lines()[0]
    plan = load(SNAPSHOT, RAM_GB=2).plan
    assert plan.budget_bytes == 2e9 and "memory budget 2.000 GB (RAM_GB=2) |" in plan.lines()[0]
    monkeypatch.setattr("load.plan.available_bytes", lambda: 1_000_000_000)
    assert re.search(r"RAM_GB=3.9, but only [12]\.\d+ GB are free now", load(SNAPSHOT, RAM_GB=3.9).plan.lines()[0])
    # plan.py may plan for a machine to come
    with closing(open_snapshot(Settings.read([], {"SNAP": str(SNAPSHOT), "RAM_GB": "500"}), anywhere=True)) as opened:
        assert opened.plan.budget_bytes == 500e9 and words in opened.plan.lines()[0]


def test_unknown_memory_is_a_notice(load, monkeypatch):
    monkeypatch.setattr("load.plan.available_bytes", lambda: None)
    plan = load(SNAPSHOT).plan
    assert plan.budget_bytes == 8e9 and "unknown" in plan.budget_source and "set RAM_GB" in plan.lines()[0]
    assert any(notice.startswith("[memory]") for notice in load(SNAPSHOT).notices)
