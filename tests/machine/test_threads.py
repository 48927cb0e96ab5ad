"""Number of threads: the cores of this process and the CPU quotas of its cgroups."""

import pytest

from machine import memory, threads


@pytest.fixture
def group(tmp_path, monkeypatch):
    """group(lines of /proc/self/cgroup, {file: content}) writes them."""

    def put(lines, files):
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        (tmp_path / "self").write_text(lines)
        monkeypatch.setattr(memory, "CGROUP_ROOT", tmp_path)
        monkeypatch.setattr(memory, "CGROUP_SELF", tmp_path / "self")
        monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)

    return put


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/a/b\n", {}, 8),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000"}, 8),
        ("0::/a/b\n", {"a/b/cpu.max": "250000 100000"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "100000 100000"}, 1),
        ("0::/a/b\n", {"cpu.max": "50000 100000"}, 1),
        ("0::/a/b\n", {"a/b/cpu.max": "9900000 100000"}, 8),
        ("0::/a/b\n", {"a/b/cpu.max": "what is this"}, 8),
        ("5:cpu,cpuacct:/x\n", {"cpu/x/cpu.cfs_quota_us": "200000", "cpu/x/cpu.cfs_period_us": "100000"}, 2),
        ("5:cpu,cpuacct:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, 8),
        ("5:memory:/x\n", {"cpu/x/cpu.cfs_quota_us": "200000", "cpu/x/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_cpu_quotas(group, lines, files, expected):
    group(lines, files)
    assert threads.num_threads() == expected


def test_without_cgroups_all_cores_count(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "CGROUP_SELF", tmp_path / "none")
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    assert threads.num_threads() == 2
