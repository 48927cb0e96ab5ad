"""The usage history: the identity of a model, what is kept over runs, and damaged files."""

import json
import math
import os
import shutil
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from errors import Refused
from experts import usage as usage_module
from experts.policy import EvictionPolicy
from experts.usage import (
    LONG_RUN_USES,
    MAX_C_ENGINE_BYTES,
    MAX_FILE_BYTES,
    MAX_USES,
    PRIMED_TOKENS,
    ROUTER_BYTES,
    UsageHistory,
    parse_history,
)
from load.model import open_snapshot
from machine import files
from settings import Settings
from snapshot.index import read_index
from tests.conftest import FIXTURES, ORACLES

NAME, LAYERS = "glm_moe_dsa", (1, 2, 3, 4)
COUNTS = {(1, 0): 0.01, (1, 7): 12.346, (3, 5): 700.0}


@pytest.fixture
def open_usage(tmp_path):
    """open_usage(folder, cache) -> its UsageHistory; by default of the fixture, in tmp_path / "cache"."""
    opened = []

    def open_usage(folder=FIXTURES / NAME, cache=tmp_path / "cache"):
        opened.append(open_snapshot(Settings.read([], {"SNAP": str(folder)})))
        return UsageHistory(opened[-1], cache)

    yield open_usage
    for snapshot in opened:
        snapshot.close()


@pytest.fixture
def copied(tmp_path):
    """A writable copy of the fixture."""
    return shutil.copytree(FIXTURES / NAME, tmp_path / "copy")


def files_below(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


# --- kept -------------------------------------------------------------------------------------------------------------


def test_a_history_is_kept_over_runs(open_usage, tmp_path):
    usage = open_usage()
    assert usage.load() == ({}, None)
    usage.save(COUNTS | {(1, 7): 12.3456789}, tokens=40)
    assert files_below(tmp_path) == [usage.path.name]
    assert json.loads(usage.path.read_text()) == {
        "usage": 1,
        "layers": list(LAYERS),
        "num_experts": 8,
        "tokens": 40,
        "counts": {str(layer): [[e, n] for (at, e), n in COUNTS.items() if at == layer] for layer in LAYERS},
    }
    second = open_usage()
    assert second.load()[1] == "[usage] starts with the expert usage of 40 tokens of earlier runs"
    assert second.history == COUNTS
    second.save(COUNTS, tokens=2)
    assert "of 42 tokens" in open_usage().load()[1]


def test_a_run_is_primed_with_a_part_of_the_history(open_usage):
    usage = open_usage()
    usage.save(COUNTS, 40)
    primed, most = usage.load()[0], usage.config.num_active_experts * PRIMED_TOKENS
    assert primed[1, 7] == 12.346 and primed[3, 5] == most < 700


def test_runs_are_added_and_decay(open_usage):
    """The primed counts of a run are not added again; its own uses are, and the history decays by tokens."""
    usage = open_usage()
    usage.load()
    usage.save({(1, 0): 30.0, (1, 1): 2.0}, tokens=40)
    usage = open_usage()
    policy = EvictionPolicy(LAYERS, 8, 2)
    policy.prime(usage.load()[0])
    for _ in range(512):
        policy.record_uses(1, {1: 1}, 1)
    usage.save(policy.use_counts(), tokens=512)
    counts = open_usage().read_history()[1]
    assert counts[1, 0] == pytest.approx(30 * 2 ** (-512 / 8192), abs=0.01)
    assert counts[1, 1] == pytest.approx(2 * 2 ** (-512 / 8192) + 0.5 * 512 / math.log(2), rel=0.01)


def test_a_run_without_uses_leaves_the_file(open_usage):
    usage = open_usage()
    usage.save(COUNTS, 40)
    usage.save({}, 40)
    assert usage.read_history()[1] == COUNTS


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file(open_usage, tmp_path, monkeypatch, error):
    usage = open_usage()
    usage.save(COUNTS, 40)
    before = usage.path.read_bytes()

    def fail(source, target):
        raise error

    monkeypatch.setattr(files.os, "replace", fail)
    if isinstance(error, OSError):
        usage.save({(1, 1): 5.0}, 40)
    else:
        with pytest.raises(KeyboardInterrupt):
            usage.save({(1, 1): 5.0}, 40)
    assert usage.path.read_bytes() == before and files_below(tmp_path) == [usage.path.name]


def test_a_cache_folder_that_cannot_be_written(open_usage, tmp_path):
    (tmp_path / "file").write_text("")
    usage = open_usage(cache=tmp_path / "file")
    usage.save(COUNTS, 40)
    assert usage.load() == ({}, None) and files_below(tmp_path) == ["file"]


def test_concurrent_saves(open_usage, tmp_path):
    """Readers meanwhile and afterwards find one complete history."""
    usage = open_usage()
    writers = [
        threading.Thread(target=lambda n=n: [usage.save({(2, e): float(n) for e in range(8)}, n) for _ in range(50)])
        for n in range(1, 5)
    ]
    usage.save({(2, e): 1.0 for e in range(8)}, 1)
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        counts, notice = UsageHistory.load(usage)
        assert len(counts) == 8 and len(set(counts.values())) == 1, notice
    for writer in writers:
        writer.join()
    assert files_below(tmp_path) == [usage.path.name]


# --- identity of a model ----------------------------------------------------------------------------------------------


def test_a_copy_is_the_same_model(open_usage, copied, tmp_path):
    path = open_usage().path
    assert path == tmp_path / "cache" / "usage" / path.name and len(path.stem) == 16 and int(path.stem, 16)
    (copied / "README.md").write_text("not of the model")
    assert open_usage(copied).path == path
    (tmp_path / "links").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "links" / name).symlink_to(copied / name)
    assert open_usage(tmp_path / "links").path == path


def test_other_models_have_other_identities(open_usage, copied, tmp_path):
    paths = [open_usage(FIXTURES / name).path for name in ORACLES if (FIXTURES / name / "model.safetensors").exists()]
    config, weights = copied / "config.json", copied / "model.safetensors"
    data = config.read_bytes(), weights.read_bytes()

    config.write_bytes(data[0] + b"\n")
    paths.append(open_usage(copied).path)
    config.write_bytes(data[0])

    router = read_index(copied).entries["model.layers.1.mlp.gate.weight"]
    changed = bytearray(data[1])
    changed[router.offset] ^= 1  # the router alone: every size stays
    weights.write_bytes(changed)
    paths.append(open_usage(copied).path)
    weights.write_bytes(data[1])

    weights.rename(copied / "other.safetensors")
    paths.append(open_usage(copied).path)

    # A longer header, as another writer makes it.
    length = int.from_bytes(data[1][:8], "little")
    (copied / "other.safetensors").rename(weights)
    weights.write_bytes((length + 8).to_bytes(8, "little") + data[1][8:][:length] + b" " * 8 + data[1][8 + length :])
    paths.append(open_usage(copied).path)
    assert len(set(paths)) == len(paths)


def test_only_the_start_of_a_router_is_read(open_usage, monkeypatch):
    usage_paths = set()
    for limit in (1, 2, ROUTER_BYTES):
        monkeypatch.setattr(usage_module, "ROUTER_BYTES", limit)
        usage_paths.add(open_usage().path)
    assert len(usage_paths) == 3


# --- damaged files ----------------------------------------------------------------------------------------------------

GOOD = {"usage": 1, "layers": [1, 2, 3, 4], "num_experts": 8, "tokens": 4, "counts": {"1": [[0, 1.5]], "3": []}}
BAD_NUMBERS = [-1, 10**400, True, False, None, "4", 4.0, [], {}, math.nan, math.inf]
BAD_PAIRS = [3, None, "ab", {}, [], [0], [0, 1.0, 2], [[0, 1.0]], {"0": 1.0}]
BAD_PAIRS += [[expert, 1.0] for expert in (8, 10**30, -1, True, 0.0, "0", None, [])]
BAD_PAIRS += [[0, uses] for uses in (-0.5, math.nan, math.inf, -math.inf, 1e5, 10**400, True, "1", None, [])]
BAD = [GOOD | {name: bad} for name in ("usage", "num_experts", "tokens") for bad in BAD_NUMBERS]
BAD += [GOOD | {"usage": 2}, GOOD | {"num_experts": 9}]
BAD += [
    GOOD | {"layers": bad}
    for bad in ([1, 2, 3], [1, 2, 3, 4, 5], [4, 3, 2, 1], [True, 2, 3, 4], [1.0, 2, 3, 4], "1234", None, {})
]
BAD += [
    GOOD | {"counts": bad} for bad in (None, [], 3, [[1, []]], {"0": []}, {"5": []}, {"01": []}, {" 1": []}, {"": []})
]
BAD += [GOOD | {"counts": {"1": bad}} for bad in (None, 3, "", "ab", {}, {"0": 1.0}, True)]
BAD += [GOOD | {"counts": {"1": [[1, 1.0], pair]}} for pair in (*BAD_PAIRS, [1, 2.0])]
BAD += [{key: value for key, value in GOOD.items() if key != name} for name in GOOD]
TEXTS = [json.dumps(bad) for bad in (*BAD, [], 3, None, "usage", [GOOD])]
TEXTS += ["", "{", json.dumps(GOOD)[:-1], json.dumps(GOOD) + "x", "\xff", "\0" * 100, "[" * 100_000, '{"a":' * 100_000]
TEXTS += ['{"usage": 1, ' + json.dumps(GOOD)[1:], json.dumps(GOOD) + " " * MAX_FILE_BYTES, "9" * 5000]
TEXTS += [json.dumps(GOOD).replace("[0, 1.5]", "[0, 1.5], " * 1000 + "[" * 50_000)]


def test_a_good_file_is_used(open_usage):
    usage = open_usage()
    usage.path.parent.mkdir(parents=True)
    usage.path.write_text(json.dumps(GOOD))
    assert usage.load() == ({(1, 0): 1.5}, "[usage] starts with the expert usage of 4 tokens of earlier runs")


def test_a_hostile_file_is_no_history(open_usage):
    usage = open_usage()
    usage.path.parent.mkdir(parents=True)
    for text in TEXTS:
        usage.path.write_bytes(text.encode("latin-1"))
        counts, notice = usage.load()
        assert counts == {} and notice.startswith("[usage] "), text[:200]
        assert notice.endswith("; starts without a history") and notice.isprintable() and len(notice) < 700
    assert usage.tokens == 0
    usage.save(COUNTS, 40)
    assert usage.read_history()[1] == COUNTS


@pytest.mark.slow
def test_a_deep_or_large_file_takes_no_time(open_usage):
    usage, started = open_usage(), time.perf_counter()
    usage.path.parent.mkdir(parents=True)
    for text in ("[" * MAX_FILE_BYTES, "9" * MAX_FILE_BYTES, '{"counts": [' + "[]," * (MAX_FILE_BYTES // 4) + "0]}"):
        usage.path.write_text(text)
        assert usage.load()[0] == {}
    with open(usage.path, "wb") as file:
        file.truncate(1 << 40)  # a hole
    assert usage.load()[0] == {}
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("nowhere", path)])
def test_a_path_that_is_no_file_is_no_history(open_usage, make):
    usage = open_usage()
    usage.path.parent.mkdir(parents=True)
    make(usage.path)
    counts, notice = usage.load()
    assert counts == {} and notice.endswith("; starts without a history")
    usage.save(COUNTS, 40)  # a folder stays, the others are replaced


VALUES = st.sampled_from([None, True, -1, 0, 2, 9, 0.5, math.nan, 1e300, "1", [], {}, [[1, 2.0]]])
PAIRS = st.lists(st.tuples(st.integers(0, 8) | VALUES, st.floats(0, 2000) | VALUES) | VALUES, max_size=4) | VALUES
TABLES = st.dictionaries(st.sampled_from(["1", "2", "5", "x"]), PAIRS, max_size=3)


@given(TABLES, st.dictionaries(st.sampled_from(sorted(GOOD)), VALUES, max_size=1))
def test_only_counts_of_the_model_are_returned(table, changes):
    try:
        tokens, counts = parse_history("file", json.dumps(GOOD | {"counts": table} | changes).encode(), LAYERS, 8)
    except Refused:
        return
    assert type(tokens) is int and tokens >= 0
    policy = EvictionPolicy(LAYERS, 8, 2)
    policy.prime(counts)
    assert all(0 < uses <= MAX_USES for uses in policy.use_counts().values())


@given(st.binary(max_size=60))
def test_any_bytes_are_refused(data):
    with pytest.raises(Refused):
        parse_history("file", data, LAYERS, 8)


# --- the C engine's file ----------------------------------------------------------------------------------------------


def c_engine(folder, text):
    (folder / ".coli_usage").write_bytes(text.encode("latin-1"))


def test_the_c_engines_file_is_the_first_history(open_usage, copied):
    c_engine(copied, "1 0 3\n1 7 4\n3 5 2\n")
    before = sorted((path, path.stat().st_mtime_ns) for path in copied.rglob("*"))
    usage = open_usage(copied)
    counts, notice = usage.load()
    assert counts == {(1, 0): 3, (1, 7): 4, (3, 5): 2}
    assert notice == "[usage] starts with .coli_usage, the C engine's history"
    usage.save(COUNTS, 40)
    assert open_usage(copied).read_history()[1] == pytest.approx(
        COUNTS | {(1, 0): 2.99, (1, 7): 12.543, (3, 5): 700.099}, abs=0.001
    )
    assert "of 40 tokens" in open_usage(copied).load()[1]  # from then on ours
    assert sorted((path, path.stat().st_mtime_ns) for path in copied.rglob("*")) == before


def test_undecayed_counts_are_scaled_to_the_decayed_limit(open_usage, copied):
    c_engine(copied, "".join(f"1 {e} {(e + 1) * 10**9}\n" for e in range(8)) + "2 0 4000000000\n3 1 5\n")
    usage = open_usage(copied)
    counts, most = usage.read_history()[1], usage.config.num_active_experts * LONG_RUN_USES
    first = [counts[1, e] for e in range(8)]
    assert sum(first) == pytest.approx(most)
    assert first == pytest.approx([first[0] * (e + 1) for e in range(8)])
    assert counts[2, 0] == pytest.approx(LONG_RUN_USES)  # no token uses an expert twice
    assert counts[3, 1] == 5
    usage.load()
    usage.save({(1, 0): 1e-9}, 0)
    assert usage.read_history()[1] == pytest.approx(counts, abs=0.001)


def test_damaged_lines_and_other_layers_are_skipped(open_usage, copied):
    good = "1 0 3\n1 0 4\n2 1 5\r\n"  # added up, as the C engine does
    bad = ["0 1 9", "5 1 9", "99999999999 1 9", "1 8 9", "1 -1 9", "-1 1 9", "1 1 -9", "1 1 9.5", "1 1 1e3", "1 1"]
    bad += [
        "1 1 9 9",
        "1 1 9x",
        "x",
        "",
        " ",
        "\0\0\0",
        "1\x001 9",
        "1 1 nan",
        "1 1 0",
        "\xb9 1 9",
        "1 1 " + "9" * 5000,
    ]
    c_engine(copied, "\n".join(bad) + "\n" + good + "\n".join(bad) + "\n1 1 12")  # cut off
    assert open_usage(copied).load()[0] == {(1, 0): 7, (2, 1): 5}
    c_engine(copied, "".join(bad))
    assert open_usage(copied).load() == ({}, None)


@pytest.mark.slow
def test_a_huge_file_of_the_c_engine(open_usage, copied):
    """The bytes that are read end in the middle of a line, which is not taken for a smaller number."""
    line = "1 1 1000000\n"
    c_engine(copied, "1 0 1\n" + line * (MAX_C_ENGINE_BYTES // len(line) + 9))
    usage = open_usage(copied)
    assert (MAX_C_ENGINE_BYTES - 6) % len(line)
    assert usage.load()[0].keys() == {(1, 0), (1, 1)}
    for text in (" " * (MAX_C_ENGINE_BYTES + 9), "1 " * MAX_C_ENGINE_BYTES, "1" * MAX_C_ENGINE_BYTES):
        started = time.perf_counter()
        c_engine(copied, text)
        assert usage.load() == ({}, None)
        assert time.perf_counter() - started < 5
    with open(copied / ".coli_usage", "wb") as file:
        file.truncate(1 << 40)
    assert usage.load() == ({}, None)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("nowhere", path)])
def test_a_c_engine_path_that_is_no_file(open_usage, copied, make):
    make(copied / ".coli_usage")
    counts, notice = open_usage(copied).load()
    assert counts == {} and ".coli_usage" in notice and notice.endswith("; starts without a history")
