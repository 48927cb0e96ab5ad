"""The budget: what is planned, what is refused, and where free memory is read."""

import pytest

import snapshot.memory
from snapshot.errors import Refused
from tests.conftest import FIXTURES

SNAPSHOT = FIXTURES / "glm_moe_dsa"


def test_cap_0_takes_what_the_budget_allows(load, monkeypatch):
    plan = load(SNAPSHOT).plan
    assert plan.num_slots == plan.num_experts == 8
    one_slot = plan.need - plan.cache + plan.num_sparse_layers * plan.slot
    monkeypatch.setattr("engine.plan.rss_bytes", lambda: plan.process)
    for spare, slots in [(0, 1), (0.99, 1), (1, 2), (5.5, 6), (100, 8)]:
        budget = one_slot + spare * plan.num_sparse_layers * plan.slot
        loaded = load(SNAPSHOT, RAM_GB=budget / 1e9 + 1e-9)
        assert loaded.plan.num_slots == slots
        assert loaded.plan.need <= loaded.plan.budget


def test_what_does_not_fit_is_refused_with_need_and_have(load, monkeypatch):
    reads = []
    monkeypatch.setattr("snapshot.reader.Reader.read_into", lambda *rest: reads.append(rest))
    with pytest.raises(Refused, match=r"need 0\.\d\d GB with one expert slot per layer and CTX=2048, have 0\.01 GB"):
        load(SNAPSHOT, RAM_GB=0.01)
    with pytest.raises(Refused, match=r"with cap 8 .* raise RAM_GB"):
        load(SNAPSHOT, cap=8, RAM_GB=0.01)
    assert not reads  # before anything was loaded


def test_one_slot_is_warned_about(load):
    assert any("one slot per layer" in notice for notice in load(SNAPSHOT, cap=1).notices)
    assert not any("one slot per layer" in notice for notice in load(SNAPSHOT, cap=2).notices)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_bits_shrink_the_plan_and_are_said(load, bits):
    plain, packed = load(SNAPSHOT).plan, load(SNAPSHOT, expert_bits=bits, dense_bits=bits)
    assert packed.plan.resident < plain.resident
    assert packed.plan.slot <= plain.slot
    assert sum("quantised" in notice for notice in packed.notices) == 2


def test_ctx_is_honoured_and_beyond_the_model_is_said(load):
    loaded = load(SNAPSHOT, CTX=64)
    assert loaded.context == 64 and loaded.plan.kv == load(SNAPSHOT, CTX=128).plan.kv // 2
    assert any("beyond the 2048 positions" in notice for notice in load(SNAPSHOT, CTX=4096).notices)
    assert load(SNAPSHOT).context == 2048


# --- free memory ------------------------------------------------------------------------------------------------------


def write_cgroup(folder, limit, used, inactive, v1=False):
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if v1 else ("memory.max", "memory.current")
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    key = "total_inactive_file" if v1 else "inactive_file"
    (folder / "memory.stat").write_text(f"anon 5\n{key} {inactive}\n")


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """A host with 100 GB free, and cgroups that a test writes."""

    def setup(line):
        (tmp_path / "self").write_text(line)
        return tmp_path / "fs"

    monkeypatch.setattr(snapshot.memory, "CGROUP_ROOT", tmp_path / "fs")
    monkeypatch.setattr(snapshot.memory, "CGROUP_SELF", tmp_path / "self")
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 100 * 10**9}))
    return setup


def test_the_tightest_ancestor_counts_without_inactive_file_pages(cgroups):
    root = cgroups("0::/user/job\n")
    write_cgroup(root / "user" / "job", "max", 5, 0)
    assert snapshot.memory.available_bytes() == 100 * 10**9
    write_cgroup(root / "user", 8 * 10**9, 6 * 10**9, 3 * 10**9)
    assert snapshot.memory.available_bytes() == 5 * 10**9
    write_cgroup(root / "user" / "job", 4 * 10**9, 10**9, 0)
    assert snapshot.memory.available_bytes() == 3 * 10**9


def test_cgroup_v1(cgroups):
    root = cgroups("4:cpu,memory:/box\n0::/\n")
    write_cgroup(root / "memory" / "box", 2 * 10**9, 10**9, 5 * 10**8, v1=True)
    write_cgroup(root / "memory", 9223372036854771712, 10**9, 0, v1=True)  # v1's way to say no limit
    assert snapshot.memory.available_bytes() == 1_500_000_000


def test_a_container_that_does_not_see_its_own_path(cgroups):
    root = cgroups("0::/docker/abc\n")
    write_cgroup(root, 3 * 10**9, 10**9, 0)
    assert snapshot.memory.available_bytes() == 2 * 10**9


def test_unknown_memory_is_said(load, monkeypatch):
    monkeypatch.setattr("engine.plan.available_bytes", lambda: None)
    plan = load(SNAPSHOT).plan
    assert plan.budget == 8e9 and "unknown" in plan.budget_source and "set RAM_GB" in plan.lines()[0]
