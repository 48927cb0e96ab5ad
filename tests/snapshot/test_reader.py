"""Reading experts: buffered and direct reads give the same bytes for any layout and after transient errors."""

import errno
import fcntl
import os
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from errors import Refused
from experts.disk import ExpertDisk, layout_expert
from experts.drive import Drive, ReadRate
from machine.arena import Arena
from snapshot import reader as reader_module
from snapshot.config_file import read_config
from snapshot.index import TensorEntry, read_index
from snapshot.reader import O_DIRECT, PAGE, FileReader, align_to_page
from tests.conftest import FIXTURES

CANARY = 0xA5
DATA = os.urandom(20 * PAGE + 123)  # of the file that most tests read
RETRY_PAUSES = reader_module.RETRY_PAUSES


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("reader") / "data"
    path.write_bytes(DATA)
    return path


@pytest.fixture(scope="module")
def direct_works(file):
    """Skip where the file system has no direct reads."""
    reader = FileReader()
    reader.read_direct(file, 0, pages(PAGE), PAGE, "")
    works = reader.can_read_direct(file)
    reader.close()
    if not works:
        pytest.skip("the file system of the temporary folder refuses O_DIRECT")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(reader_module, "RETRY_PAUSES", (0, 0))


def pages(num_bytes):
    """A page-aligned memoryview with canaries in every byte."""
    view = memoryview(Arena(num_bytes).memory)[:num_bytes]
    view[:] = bytes([CANARY]) * num_bytes
    return view


class Faults:
    """A preadv that does what `faults` say, one for each call, and then works: an errno, a number of bytes at most, or
    None. `direct_fails` is the errno of every direct read."""

    def __init__(self, *faults, direct_fails=None):
        self.faults, self.direct_fails, self.calls = list(faults), direct_fails, 0

    def __call__(self, descriptor, buffers, offset):
        self.calls += 1
        if self.direct_fails and fcntl.fcntl(descriptor, fcntl.F_GETFL) & O_DIRECT:
            raise OSError(self.direct_fails, os.strerror(self.direct_fails))
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, int) and fault < 0:
            raise OSError(-fault, os.strerror(-fault))
        count = os.preadv(descriptor, buffers, offset)
        return count if fault is None else min(count, fault)


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in FIXTURES.glob("*/model.safetensors")))
def test_direct_and_buffered_reads_of_every_fixture(folder, direct_works):
    config, family = read_config(FIXTURES / folder)
    reader = FileReader()
    disk = ExpertDisk(config, family, read_index(FIXTURES / folder), reader)
    drive, data = disk.drives.all[0], (FIXTURES / folder / "model.safetensors").read_bytes()
    for (layer, expert), expert_layout in disk.layouts.items():
        buffers = [pages(expert_layout.num_bytes), pages(expert_layout.num_bytes)]
        for mode, buffer in zip(("buffered", "direct"), buffers, strict=True):
            drive.speed = ReadRate(mode)
            disk.read_expert(layer, expert, buffer)
            for run in expert_layout.ranges:
                assert buffer[run.buffer_offset :][: run.num_bytes] == data[run.offset :][: run.num_bytes]
    assert any(flags for _, flags in reader.descriptors)
    reader.close()


def make_matrix(path, data, scales):
    """A stand-in for a StoredWeight with the byte ranges of its data and scales."""
    entries = [TensorEntry("t", path, offset, num_bytes, dtype, ()) for offset, num_bytes, dtype in (data, scales)]
    return SimpleNamespace(
        entries=entries, data=entries[0], scales=entries[1], format=None, rows=1, columns=1, selection=None
    )


@st.composite
def layouts(draw):
    """Data and scales of three matrices in any order: adjacent, or with a gap of up to two pages."""
    at, spans = draw(st.integers(0, PAGE + 100)), {"U8": [], "scales": []}
    for kind in draw(st.permutations(["U8", "scales"] * 3)):
        dtype = kind if kind == "U8" else draw(st.sampled_from(["F16", "F32"]))
        num_bytes = draw(st.integers(1, 700)) * {"U8": 1, "F16": 2, "F32": 4}[dtype]
        spans[kind].append((at, num_bytes, dtype))
        at += num_bytes + draw(st.sampled_from([0, 0, 0, 1, 2, 8, 700, PAGE, 2 * PAGE - 700]))
    return list(zip(draw(st.permutations(spans["U8"])), spans["scales"], strict=True))


@settings(max_examples=150)
@given(layouts())
def test_any_layout(file, layout):
    expert_layout = layout_expert([make_matrix(file, data, scales) for data, scales in layout])
    reader = FileReader()
    try:
        for mode in ("buffered", "direct"):
            buffer = pages(expert_layout.num_bytes)
            Drive(file.parent, reader, ReadRate(mode)).read_expert(expert_layout, buffer, "")
            for (data, scales), matrix in zip(layout, expert_layout.matrices, strict=True):
                assert matrix.scales_offset % matrix.scale_dtype.itemsize == 0
                assert buffer[matrix.data_offset :][: data[1]] == DATA[data[0] :][: data[1]]
                assert buffer[matrix.scales_offset :][: scales[1]] == DATA[scales[0] :][: scales[1]]
            if mode == "buffered":  # nothing but the runs was written
                written = bytearray(bytes([CANARY]) * expert_layout.num_bytes)
                for run in expert_layout.ranges:
                    start = run.buffer_offset
                    written[start : start + run.num_bytes] = DATA[run.offset : run.offset + run.num_bytes]
                assert buffer == written
    finally:
        reader.close()
    for run in expert_layout.ranges:
        assert run.buffer_offset % PAGE == (run.offset % PAGE if run.is_congruent else 0)
    for run, after in pairwise(expert_layout.ranges):
        assert align_to_page(run.buffer_offset + run.num_bytes) <= after.buffer_offset // PAGE * PAGE
    last = expert_layout.ranges[-1]
    assert expert_layout.num_bytes == align_to_page(last.buffer_offset + last.num_bytes)


def test_misaligned_scales_are_aligned_in_memory(file):
    """A float at an odd offset of the file is aligned in memory, so it is read buffered."""
    expert_layout = layout_expert([make_matrix(file, (0, 101, "U8"), (101, 40, "F32"))])
    assert [(run.buffer_offset, run.is_congruent) for run in expert_layout.ranges] == [(0, True), (PAGE, False)]
    reader, buffer = FileReader(), pages(expert_layout.num_bytes)
    Drive(file.parent, reader, ReadRate("direct")).read_expert(expert_layout, buffer, "")
    reader.close()
    assert buffer[:101] == DATA[:101] and buffer[PAGE : PAGE + 40] == DATA[101:141]


def test_a_buffer_that_begins_inside_a_page_is_read_buffered(file):
    expert_layout = layout_expert([make_matrix(file, (100, 200, "U8"), (300, 40, "F16"))])
    reader, buffer = FileReader(), pages(expert_layout.num_bytes + 64)[64:]
    Drive(file.parent, reader, ReadRate("direct")).read_expert(expert_layout, buffer, "")
    assert buffer[100:340] == DATA[100:340] and all(flags == 0 for _, flags in reader.descriptors)
    reader.close()


# --- read errors --------------------------------------------------------------------------------------------------


def read(path, reader, mode, offset=100, num_bytes=2 * PAGE):
    """`num_bytes` from an unaligned `offset`."""
    try:
        if mode == "buffered":
            buffer = pages(num_bytes)
            reader.read_into(path, offset, buffer, "tensor x")
            return bytes(buffer)
        before = offset % PAGE
        buffer = pages(align_to_page(before + num_bytes))
        reader.read_direct(path, offset - before, buffer, before + num_bytes, "tensor x")
        return bytes(buffer[before : before + num_bytes])
    finally:
        reader.close()


@pytest.mark.parametrize("mode", ["buffered", "direct"])
def test_short_reads(file, mode):
    for size in (1, 2, 99, 100, 101, 511, 512, 4095, 4096, 4097, 8191, 8192, 8291, 8292):
        faults = Faults(*[size] * 3 * PAGE)
        assert read(file, FileReader(faults), mode) == DATA[100 : 100 + 2 * PAGE]


@pytest.mark.parametrize("mode", ["buffered", "direct"])
def test_transient_errors_are_retried(file, mode):
    for error in reader_module.TRANSIENT_ERRORS:
        for times in (1, 2):
            faults = Faults(*[-error] * times, 5, -error)  # and again in the middle
            assert read(file, FileReader(faults), mode) == DATA[100 : 100 + 2 * PAGE]


@pytest.mark.parametrize("mode", ["buffered", "direct"])
@pytest.mark.parametrize(("error", "calls"), [(errno.EIO, 3), (errno.EINTR, 3), (errno.ESTALE, 1)])
def test_persistent_errors_are_refused(file, mode, error, calls):
    """Three attempts, one for other errors; the message names file, byte, error and tensor."""
    faults = Faults(*[-error] * 9)
    at = 100 if mode == "buffered" else 0
    problem = rf"data: {os.strerror(error)} \(errno {error}\) at byte {at}, reading tensor x"
    with pytest.raises(Refused, match=problem):
        read(file, FileReader(faults), mode)
    assert faults.calls == calls


def test_pauses_are_short():
    assert len(RETRY_PAUSES) == 2 and 0 < sum(RETRY_PAUSES) < 1


@pytest.mark.parametrize("error", reader_module.DIRECT_UNSUPPORTED)
def test_direct_reads_that_are_refused_are_buffered(file, error):
    """Refused at open or at the read, and tried only once for a file."""
    faults = Faults(direct_fails=error)
    reader = FileReader(faults)
    buffer = pages(PAGE)
    for _ in range(3):
        reader.read_direct(file, 0, buffer, PAGE, "")
    assert buffer == DATA[:PAGE] and not reader.can_read_direct(file)
    assert faults.calls == (4 if O_DIRECT else 3)
    reader.close()


def test_a_system_without_direct_reads(file, monkeypatch):
    """macOS has no O_DIRECT, and no posix_fadvise."""
    monkeypatch.setattr(reader_module, "O_DIRECT", 0)
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    reader = FileReader()
    reader.drop_cached(file, 0, PAGE)
    assert not reader.can_read_direct(file)
    assert read(file, reader, "direct") == DATA[100 : 100 + 2 * PAGE]


@pytest.mark.parametrize("mode", ["buffered", "direct"])
def test_the_end_of_a_file(file, mode):
    """The last page is partial: its bytes are read; beyond them the file is too short."""
    end = len(DATA)
    assert read(file, FileReader(), mode, end - 5000, 5000) == DATA[-5000:]
    with pytest.raises(Refused, match=f"data: ends at byte {end}, inside tensor x; download it again"):
        read(file, FileReader(), mode, end - 5000, 5001)


@pytest.mark.parametrize("mode", ["buffered", "direct"])
def test_a_file_that_is_cut_or_replaced_by_a_shorter_one(tmp_path, mode):
    path, buffer, reader = tmp_path / "data", pages(PAGE), FileReader()
    path.write_bytes(DATA)
    get = reader.read_direct if mode == "direct" else lambda *a: reader.read_into(*a[:3], a[4])
    get(path, 0, buffer, PAGE, "tensor x")
    os.truncate(path, 5000)
    with pytest.raises(Refused, match="ends at byte 5000, inside tensor x"):
        get(path, PAGE, buffer, PAGE, "tensor x")
    reader.close()
    (tmp_path / "short").write_bytes(DATA[:10])
    os.replace(tmp_path / "short", path)
    with pytest.raises(Refused, match="ends at byte"):
        get(path, PAGE, buffer, PAGE, "tensor x")
    reader.close()


def test_a_missing_file(tmp_path):
    with pytest.raises(Refused, match=r"gone: No such file or directory \(errno 2\) at byte 100, reading tensor x"):
        read(tmp_path / "gone", FileReader(), "buffered")
