"""bench/infer_bench.py, the cost model and the peaks: numbers counted by hand, and runs whose last line is JSON."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import cost, infer_bench, peaks
from bench.infer_bench import main
from bench.infer_numbers import StepCosts, floors, percentile, summarize
from bench.infer_run import RequestedBytes, TimedRun
from bench.peaks import PEAKS, Peaks, find_peaks
from kernels.formats import FLOATS
from kernels.weight import Weight
from settings import EMBEDDED_SNAPSHOT
from snapshot.config_file import read_config

# ---------------------------------------------------------------------------------------------------------------------
# The cost model


@pytest.fixture(scope="module")
def toy():
    """Two layers, the second sparse; the indexer of the first serves both."""
    config, _ = read_config(EMBEDDED_SNAPSHOT)
    return replace(
        config,
        vocab_size=100,
        hidden_size=10,
        num_layers=2,
        num_heads=2,
        q_lora_rank=4,
        kv_lora_rank=3,
        nope_head_dim=5,
        rope_head_dim=1,
        v_head_dim=2,
        indexer_types=("full", "shared"),
        index_topk=4,
        index_num_heads=3,
        index_head_dim=2,
        mlp_types=("dense", "sparse"),
        intermediate_size=20,
        num_experts=8,
        num_active_experts=2,
        moe_intermediate_size=5,
        num_shared_experts=1,
    )


# Weights of a layer: q_a 40, q_b 48, kv_a 40, kv_b 42, o 40. Indexer: k 20; its selection, q_b 24, head weights 30.
# The dense MLP 600; router 80, two experts and the shared one 450. The LM head 1,000.
ATTENTION, INDEX_KEYS, SELECTION, MLP, MOE, HEAD = 210, 20, 54, 600, 530, 1000
ATTENDED = 2 * 2 * (2 * 3 + 1)  # FLOPs of a layer for each position that a token attends to
SCORED = 2 * 3 * (2 + 1)  # of an indexer for each position


def test_matrix_weights_of_a_token(toy):
    assert cost.matrix_weights(toy) == 2 * ATTENTION + INDEX_KEYS + MLP + MOE
    assert cost.matrix_weights(toy, has_indexer=False) == 2 * ATTENTION + MLP + MOE
    assert cost.selection_weights(toy) == SELECTION


def test_decode_flops(toy):
    weights = 2 * (2 * ATTENTION + INDEX_KEYS + MLP + MOE + HEAD)
    assert cost.decode_flops(toy, 4) == weights + 2 * 4 * ATTENDED
    assert cost.decode_flops(toy, 9) == weights + 2 * 4 * ATTENDED + 2 * SELECTION + 9 * SCORED
    assert cost.decode_flops(toy, 9, has_indexer=False) == weights - 2 * INDEX_KEYS + 2 * 9 * ATTENDED


@pytest.mark.parametrize("has_indexer", [True, False])
@pytest.mark.parametrize("length", [1, 4, 5, 50])
def test_prefill_flops_are_those_of_its_tokens_without_logits(toy, length, has_indexer):
    tokens = sum(cost.decode_flops(toy, context, has_indexer) - 2 * HEAD for context in range(1, length + 1))
    assert cost.prefill_flops(toy, length, has_indexer) == tokens + 2 * HEAD


def test_kv_cache_bytes(toy):
    assert cost.kv_bytes_per_token(toy) == 4 * (2 * 4 + 2)
    assert cost.kv_bytes_per_token(toy, has_indexer=False) == 4 * 2 * 4
    assert cost.kv_bytes_read(toy, 3) == 4 * 2 * 3 * 4
    assert cost.kv_bytes_read(toy, 9) == 4 * (2 * 4 * 4 + 9 * 2)
    assert cost.kv_bytes_read(toy, 9, has_indexer=False) == 4 * 2 * 9 * 4


def test_weight_bytes(toy):
    weight = Weight(torch.zeros(3, 5, dtype=torch.bfloat16), 5, FLOATS["BF16"])
    assert cost.weight_bytes(weight) == 30 and cost.weight_bytes(torch.zeros(7)) == 28 and cost.weight_bytes(None) == 0


def test_a_step_reads_dense_weights_once(load):
    loaded = load(EMBEDDED_SNAPSHOT)
    weights, config = loaded.model.weights, loaded.config
    everything = loaded.dense.num_bytes(16) - weights.embed.num_bytes
    # The dense bytes include the alignment of each matrix to 64 bytes.
    assert 0 <= everything - cost.dense_bytes_read(weights, config, 1000) < 64 * len(loaded.dense.matrices)
    saved = cost.dense_bytes_read(weights, config, 1000) - cost.dense_bytes_read(weights, config, 256)
    assert saved == 3 * 2 * cost.selection_weights(config)  # bf16, three layers


def test_bytes_of_an_expert(load):
    loaded = load(EMBEDDED_SNAPSHOT)
    layout = loaded.disk.layouts[1, 0]
    weights = 3 * 192 * 64
    assert cost.expert_bytes(layout) == 2 * weights == layout.stored_bytes
    assert cost.expert_bytes(layout, 4) == weights / 2 + 4 * weights / 64  # float32 scales


# ---------------------------------------------------------------------------------------------------------------------
# The numbers of a run

COSTS = StepCosts(dense_bytes=1000, row_kv_bytes=50, row_flops=400, expert_bytes=600)
MACHINE = Peaks(flops=1e4, bandwidth=1e5, flops_source="", bandwidth_source="")
ONE = TimedRun(batch=1, state="warm", ttft=0.5, steps=(0.1, 0.1), forwards=2, token_rows=2, peak_bytes=7,
               union_bytes=1200, row_bytes=1200, disk_bytes=600)  # fmt: skip
FOUR = TimedRun(batch=4, state="warm", ttft=0.7, steps=(0.1, 0.4, 0.2, 0.1), forwards=4, token_rows=16, peak_bytes=9,
                union_bytes=6000, row_bytes=9600, disk_bytes=3200, prefill_disk_bytes=11, hit_rate=0.25,
                wait_seconds=0.2)  # fmt: skip


def test_a_line_of_the_sweep_as_counted_by_hand():
    line = summarize(FOUR, COSTS, MACHINE, 1e4, ONE)
    expected = {
        "batch_size": 4,
        "state": "warm",
        "ttft_sec": 0.7,
        "tpot_sec": 0.2,  # of an even number the upper median
        "tpot_p95_sec": 0.4,
        "tok_per_sec": 16 / 0.8,
        "mbu_percent": 100 * (1000 + 1500 + 200) / 0.2 / 1e5,
        "mfu_percent": 100 * 1600 / 0.2 / 1e4,
        "peak_vram_bytes": None,
        "peak_memory_bytes": 9,
        "decode_steps": 4,
        "steps_per_forward": 1,
        "hit_rate": 0.25,
        "disk_bytes_per_token": 200,
        "prefill_disk_bytes": 11,
        "disk_wait_share": 0.25,
        "drive_use": 3200 / 0.8 / 1e4,
        "expert_bytes_one_row": 600,
        "expert_bytes_union": 1500,
        "union_ratio": 0.4,
        "speedup": 2,
        "speedup_share": 2 / (4 * 0.4),
        "disk_ratio": 300 / 800,
        "disk_speedup_share": 2 / (4 * 300 / 800),
        "floor_sec": 0.16,
        "floor_share": 0.8,
    }
    assert line == {name: pytest.approx(value) if value else value for name, value in expected.items()}
    bounds = floors(FOUR, COSTS, MACHINE, 1e4)
    assert bounds == pytest.approx({"memory": 2700 / 1e5, "arithmetic": 1600 / 1e4, "disk": 800 / 1e4})


def test_with_draft_tokens_a_step_has_its_share_of_a_forward():
    """Two forwards, each with 3 draft tokens a sequence, gave four steps."""
    drafted = replace(FOUR, forwards=2, token_rows=2 * 4 * 4)
    line = summarize(drafted, COSTS, MACHINE, None)
    assert line["steps_per_forward"] == 2
    assert line["mbu_percent"] == pytest.approx(100 * (2 * 1000 + 6000 + 32 * 50) / 4 / 0.2 / 1e5)
    assert line["mfu_percent"] == pytest.approx(100 * 8 * 400 / 0.2 / 1e4)
    assert line["floor_sec"] == pytest.approx(max((2 * 1000 + 6000 + 32 * 50) / 4 / 1e5, 8 * 400 / 1e4))


def test_unknown_numbers_are_none():
    line = summarize(replace(FOUR, union_bytes=0, row_bytes=0), COSTS, Peaks(None, None, "", ""), None)
    unknown = ("mbu_percent", "mfu_percent", "drive_use", "union_ratio", "speedup", "speedup_share", "disk_ratio",
               "disk_speedup_share", "floor_sec", "floor_share")  # fmt: skip
    assert all(line[name] is None for name in unknown)
    assert summarize(FOUR, COSTS, MACHINE, None)["drive_use"] is None


def test_percentiles():
    assert percentile([3, 1, 2], 0.95) == 3
    assert percentile(range(1, 101), 0.95) == 95
    assert percentile([5], 0.95) == 5


def test_requested_bytes_once_an_expert_and_once_a_row():
    requested = RequestedBytes({1: 10, 2: 100})
    requested.record(1, {0: 3, 5: 1}, 3, torch.tensor([0, 1, 2, 2]))
    requested.record(2, {7: 2}, 3, torch.tensor([0, 1]))
    assert (requested.union_bytes, requested.row_bytes) == (20 + 100, 40 + 200)
    requested.reset()
    assert (requested.union_bytes, requested.row_bytes) == (0, 0)


# ---------------------------------------------------------------------------------------------------------------------
# Peaks

NAMES = {
    "NVIDIA H200": "h200",
    "NVIDIA H200 NVL": "h200 nvl",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100 pcie",
    "NVIDIA H100 NVL": "h100 nvl",
    "NVIDIA H20": "h20",
    "NVIDIA GH200 480GB": "gh200 480gb",
    "NVIDIA B200": "b200",
    "NVIDIA B300": "b300",
    "NVIDIA GB200": "gb200",
    "NVIDIA A100-SXM4-40GB": "a100 40gb",
    "NVIDIA A100-SXM4-80GB": "a100 80gb",
    "NVIDIA A100-PCIE-40GB": "a100 40gb pcie",
    "NVIDIA A100 80GB PCIe": "a100 80gb pcie",
    "NVIDIA A40": "a40",
    "NVIDIA A30": "a30",
    "NVIDIA A10": "a10",
    "NVIDIA L4": "l4",
    "NVIDIA L40": "l40",
    "NVIDIA L40S": "l40s",
    "NVIDIA RTX A6000": "rtx a6000",
    "NVIDIA GeForce RTX 3090": "rtx 3090",
    "NVIDIA GeForce RTX 4090": "rtx 4090",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI250X": "mi250x",
}
UNKNOWN = (
    "NVIDIA RTX A4000", "NVIDIA RTX A1000", "NVIDIA A100X", "NVIDIA A10G", "NVIDIA A800-SXM4-80GB", "NVIDIA GB10",
    "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA RTX 6000 Ada Generation", "Quadro RTX 6000", "NVIDIA RTX PRO 6000 Blackwell",
    "NVIDIA GeForce RTX 4080 SUPER", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H800",
    "NVIDIA L20", "Tesla T4", "Tesla V100-SXM2-16GB", "cpu", "",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_find_peaks_by_device_name(name):
    assert find_peaks(name) == find_peaks(name.upper()) == PEAKS[NAMES[name]]


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_device_names_have_no_peaks(name):
    assert find_peaks(name) == (None, None)


def test_each_table_entry_matches_its_own_name_best():
    """Each entry is found by its own words, and of those that fit a name only one has the most words."""
    for entry, numbers in PEAKS.items():
        assert find_peaks(f"Maker {entry} 1GB") == numbers
        others = [other for other in PEAKS if set(other.split()) <= set(entry.split()) and other != entry]
        assert all(len(other.split()) < len(entry.split()) for other in others)
    for flops, bandwidth in PEAKS.values():
        assert 5e13 < flops < 5e15 and 2e11 < bandwidth < 1e13


def test_given_peaks_override_table_and_measurement(monkeypatch):
    monkeypatch.setattr(peaks, "measure_flops", lambda threads: (3.0, "measured"))
    monkeypatch.setattr(peaks, "measure_bandwidth", lambda threads: (4.0, "measured"))
    find = peaks.find_machine_peaks
    assert find(1) == Peaks(3.0, 4.0, "measured", "measured")
    assert find(1, flops=7.0) == Peaks(7.0, 4.0, "given", "measured")
    assert find(1, "NVIDIA H200", bandwidth=8.0) == Peaks(989e12, 8.0, "table, by the device's name", "given")
    assert find(1, "NVIDIA H2000").flops is None


def test_peak_memory_after_a_reset():
    peaks.reset_peak()
    before = peaks.peak_memory()
    big = torch.ones(25_000_000)
    assert peaks.peak_memory() >= before + 90e6
    del big


# ---------------------------------------------------------------------------------------------------------------------
# Runs

GIVEN = "--peak-flops", "1e11", "--peak-bandwidth", "1e10"


@pytest.fixture
def bench(capsys, monkeypatch, tmp_path):
    """bench(*options, **variables) -> (exit code, lines of stdout, stderr); peaks are given, not measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("KERNELS", "reference")
    monkeypatch.setattr(infer_bench, "WARM_UP", 2)

    def run(*options, given=GIVEN, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        code = main([*given, *map(str, options)])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return run


def test_the_last_line_is_json_with_all_numbers(bench):
    code, lines, _ = bench("--prompt", 24, "--decode", 4, "--batches", "3,1", "--temperature", 0)
    assert code == 0
    numbers = json.loads(lines[-1])
    assert [row["batch_size"] for row in numbers["sweep"]] == [1, 3]
    one, three = numbers["sweep"]
    assert one["decode_steps"] == three["decode_steps"] == 3
    assert one["expert_bytes_one_row"] == numbers["expert_bytes_per_row"] == 4 * 4 * 2 * 3 * 192 * 64
    # Greedy sequences are the same: three request the experts of one.
    assert three["expert_bytes_union"] == one["expert_bytes_union"] and three["union_ratio"] == 1
    assert three["hit_rate"] == 1 and three["disk_bytes_per_token"] == 0 and three["drive_use"] is None
    assert numbers["source"] == "tiny" and numbers["step"] is None and numbers["gpu"] is None
    assert numbers["peak_flops"] == 1e11 and numbers["peak_bandwidth"] == 1e10 and numbers["c_mid"] == 26
    assert numbers["prompt_tokens"] == 24 and numbers["decode_tokens"] == 4 and numbers["temperature"] == 0
    assert numbers["draft"] == "0" and one["steps_per_forward"] == three["steps_per_forward"] == 1
    assert numbers["params"] == sum(numbers["dtypes"].values()) and numbers["model_config"]["num_layers"] == 5
    assert numbers["decode_flops"] == cost.decode_flops(read_config(EMBEDDED_SNAPSHOT)[0], 26)
    prefill = numbers["prefill"]
    assert prefill["tok_per_sec"] == pytest.approx(24 / prefill["time_sec"])
    step_bytes = numbers["resident_bytes_read"] + three["expert_bytes_union"] + 3 * numbers["kv_bytes_read_per_row"]
    assert three["mbu_percent"] == pytest.approx(100 * step_bytes / three["tpot_sec"] / 1e10)
    assert lines[0].startswith("model       tiny: glm_moe_dsa, 5.60 M parameters")
    assert [line.split()[:2] for line in lines if line[4:10] == " warm "] == [["1", "warm"], ["3", "warm"]]


def test_draft_tokens_with_draft_set(bench):
    """Greedy, many draft tokens of the embedded model's MTP layer are accepted: fewer forwards than steps."""
    code, lines, _ = bench("--prompt", 24, "--decode", 20, "--batches", "1,3", "--temperature", 0, DRAFT=3)
    numbers = json.loads(lines[-1])
    assert code == 0 and numbers["draft"] == "3" and any(line.startswith("[draft] accepted by") for line in lines)
    for row in numbers["sweep"]:
        assert row["decode_steps"] == 19 and row["steps_per_forward"] > 1.2
        assert 0 < row["tpot_sec"] <= row["tpot_p95_sec"] and row["expert_bytes_one_row"] > 0


def test_a_prompt_that_does_not_fit_is_cut_with_a_note(bench):
    code, lines, _ = bench("--prompt", 5000, "--decode", 3, "--batches", 1, CTX=40)
    assert code == 0 and lines[0].startswith("note: the prompt has 37 tokens instead of 5000")
    assert json.loads(lines[-1])["prompt_tokens"] == 37


def test_streamed_experts_cold_and_warm(bench, oracle_folder):
    """Two expert slots a layer: experts are read from disk, shared by the sequences. The snapshot has no tokenizer."""
    folder = oracle_folder("glm_moe_dsa")
    options = ("--prompt", 9, "--decode", 5, "--batches", "1,2", "--cold")
    code, lines, _ = bench(*options, 2, SNAP=folder)
    assert code == 0
    numbers = json.loads(lines[-1])
    assert [(row["batch_size"], row["state"]) for row in numbers["sweep"]] == [
        (1, "cold"), (1, "warm"), (2, "cold"), (2, "warm"),
    ]  # fmt: skip
    assert numbers["slots"] < numbers["num_experts"] and numbers["peak_drive"] > 0
    for row in numbers["sweep"]:
        assert row["disk_bytes_per_token"] > 0 and row["drive_use"] > 0 and 0 <= row["hit_rate"] < 1
        assert 0 < row["union_ratio"] <= 1 and row["speedup_share"] > 0 and row["disk_speedup_share"] > 0
        assert row["tpot_p95_sec"] >= row["tpot_sec"] > 0 and row["prefill_disk_bytes"] > 0


def test_a_cold_run_reads_experts_and_a_warm_one_does_not(bench):
    # A wrong prefetch would count too.
    code, lines, _ = bench("--prompt", 16, "--decode", 3, "--batches", 1, "--cold", LOOKAHEAD=0)
    cold, warm = json.loads(lines[-1])["sweep"]
    assert code == 0 and cold["disk_bytes_per_token"] > 0 == warm["disk_bytes_per_token"]
    assert cold["prefill_disk_bytes"] > 0 == warm["prefill_disk_bytes"]
    assert cold["hit_rate"] < warm["hit_rate"] == 1


def test_peaks_are_measured(bench, monkeypatch):
    monkeypatch.setattr(peaks, "MEASURE_SECONDS", 0.0)
    monkeypatch.setattr(peaks, "LARGE", 64)
    code, lines, _ = bench("--prompt", 4, "--decode", 2, "--batches", 1, given=())
    numbers = json.loads(lines[-1])
    assert code == 0 and numbers["peak_flops"] > 0 and numbers["peak_bandwidth"] > 0
    assert "linear" in numbers["peak_flops_source"] and "torch" in numbers["peak_bandwidth_source"]
    assert 0 < numbers["sweep"][0]["mbu_percent"] < math.inf


def test_an_unknown_device_gives_no_utilization(bench):
    code, lines, err = bench(
        "--prompt", 4, "--decode", 2, "--batches", 1, "--device-name", "NVIDIA RTX A4000", given=()
    )
    numbers = json.loads(lines[-1])
    assert code == 0 and "NVIDIA RTX A4000 is not known" in err
    assert numbers["peak_flops"] is numbers["peak_bandwidth"] is numbers["ceiling_tok_per_sec"] is None
    assert numbers["sweep"][0]["mbu_percent"] is numbers["prefill"]["mfu_percent"] is None


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--batches", "1,x"], "--batches: value='x': expected a whole number from 1"),
        (["--batches", "0"], "--batches: value='0': expected a whole number from 1"),
        (["--decode", "1"], "--decode: value='1': expected a whole number from 2"),
        (["--decode", "2000"], "--decode 2000 leaves no room for a prompt in 1024 positions"),
        (["--prompt", "-3"], "--prompt"),
        (["--temperature", "nan"], "--temperature: value='nan': expected a number from 0"),
        (["--peak-flops", "0"], "--peak-flops: value='0': expected a number from 1"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["1", "16", "16", "4"], "4 arguments, at most 3"),
        (["--plot", "no/such/folder/a.png"], "--plot"),
    ],
)
def test_bad_input_is_one_line(bench, options, what):
    code, lines, err = bench(*options)
    assert code == 2 and not lines
    complaint = err.splitlines()[-1]
    assert complaint.startswith("infer_bench: ") and what in complaint and "Traceback" not in err


def test_batches_that_do_not_fit_are_refused(bench):
    code, _, err = bench("--batches", "1,100000", "--prompt", 500, "--decode", 100, RAM_GB=1)
    assert code == 2 and err.splitlines()[-1].startswith(
        "infer_bench: 100000 sequences of 600 positions: the model does not fit"
    )
    code, _, err = bench(SNAP="no/such/folder")
    assert code == 2 and "SNAP=no/such/folder" in err


def test_plot_writes_a_png(bench, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "sweep.png"
    code, _, _ = bench("--prompt", 8, "--decode", 3, "--batches", "1,2", "--plot", path)
    assert code == 0 and Path(path).read_bytes().startswith(b"\x89PNG")
