"""The header of a GGUF file: what is read from it, and what is refused before memory is taken."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot.gguf import read_gguf, read_metadata
from snapshot.gguf_types import GGUF_TYPES, NOT_IN_FILES
from tests.support.gguf_files import Typed, gguf_bytes, item, pair, tensor_info, text, write_gguf
from tests.support.hostile import attempt, few

METADATA = {
    "general.architecture": "olmoe",
    "olmoe.block_count": 2,
    "olmoe.attention.layer_norm_rms_epsilon": 0.5,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.tokens": ["!", "Ġ a", "é"],
    "tokenizer.ggml.scores": [0.0, -1.5, 2.0],
    "wide": Typed(10, 1 << 40),
    "signed": Typed(5, [-1, 2]),
    "flags": [True, False, True],
    "empty": Typed(8, []),
}
Q8_ROWS = bytes(range(68))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def test_reads_metadata_and_tensors(path):
    """Values of every kind, and tensors rows first with offsets from the start of the file."""
    write_gguf(path, METADATA, {"a.weight": (0, (3,), b"abcdefghijkl"), "b.weight": (8, (2, 32), Q8_ROWS)})
    expected = {key: value.value if isinstance(value, Typed) else value for key, value in METADATA.items()}
    assert read_metadata(path) == expected
    tensors = read_gguf(path).tensors
    assert [(t.dtype, t.shape, t.num_bytes) for t in tensors.values()] == [("F32", (3,), 12), ("q8_0", (2, 32), 68)]
    data = path.read_bytes()
    assert data[tensors["a.weight"].offset :][:12] == b"abcdefghijkl"
    assert data[tensors["b.weight"].offset :] == Q8_ROWS


def test_alignment_of_the_file(path):
    """general.alignment moves the data and every tensor."""
    write_gguf(path, {"general.alignment": 64}, {"a": (0, (1,), b"1234"), "b": (0, (1,), b"5678")}, 64)
    a, b = read_gguf(path).tensors.values()
    assert a.offset % 64 == b.offset % 64 == 0 and b.offset == a.offset + 64


def test_sizes_of_blocks_are_those_of_the_gguf_package():
    """Every type that the package knows has its name and sizes here, or is one that files do not hold."""
    gguf = pytest.importorskip("gguf")
    for kind, (values, num_bytes) in gguf.GGML_QUANT_SIZES.items():
        if kind.value not in NOT_IN_FILES:
            ours = GGUF_TYPES[kind.value]
            assert (ours.name.lower(), ours.values, ours.num_bytes) == (kind.name.lower(), values, num_bytes)


ONE = tensor_info("a", (4,), 0, 0)
BROKEN = {
    "no magic": (b"GGML" + bytes(40), "no GGUF file"),
    "empty": (b"", "cut short"),
    "version 1": (gguf_bytes(version=1), "version 1"),
    "big-endian": (gguf_bytes(version=3 << 24), "big-endian"),
    "counts": (gguf_bytes(counts=(1 << 60, 0)), "number of tensors is 1152921504606846976"),
    "negative counts": (gguf_bytes(counts=(0, -1)), "pairs is -1"),
    "key of a terabyte": (gguf_bytes([struct.pack("<Q", 1 << 40) + bytes(20)]), "length of the key of pair 0"),
    "text of a terabyte": (gguf_bytes([text("k") + struct.pack("<IQ", 8, 1 << 40)]), "the length of k"),
    "array of a terabyte": (gguf_bytes([text("k") + struct.pack("<IIQ", 9, 8, 1 << 40)]), "the length of k"),
    "arrays of arrays": (gguf_bytes([text("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(20)]), "array of arrays"),
    "value type": (gguf_bytes([text("k") + struct.pack("<I", 13) + bytes(8)]), "unknown value type 13"),
    "item type": (gguf_bytes([text("k") + struct.pack("<IIQ", 9, 77, 1) + bytes(8)]), "unknown value type 77"),
    "empty key": (gguf_bytes([pair("", 1)]), "empty key"),
    "key twice": (gguf_bytes([pair("k", 1), pair("k", 1)]), "k twice"),
    "no UTF-8": (gguf_bytes([text("k") + struct.pack("<I", 8) + text(b"\xff")]), "UTF-8"),
    "no UTF-8 in a list": (
        gguf_bytes([text("k") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text(b"\xff")]),
        "k[1] is not valid UTF-8",
    ),
    "alignment 0": (gguf_bytes([pair("general.alignment", 0)]), "power of two"),
    "alignment 24": (gguf_bytes([pair("general.alignment", 24)]), "power of two"),
    "alignment of text": (gguf_bytes([pair("general.alignment", "x")]), "power of two"),
    "name too long": (gguf_bytes((), [tensor_info("a" * 64, (4,), 0, 0)], bytes(16)), "length of the name"),
    "name of a terminal": (gguf_bytes((), [tensor_info("a\x1b[2J", (4,), 0, 0)], bytes(16)), "no name of a tensor"),
    "tensor twice": (gguf_bytes((), [ONE, tensor_info("a", (4,), 0, 32)], bytes(64)), "a is there twice"),
    "no dimensions": (gguf_bytes((), [tensor_info("a", (), 0, 0)], bytes(16)), "0 dimensions"),
    "five dimensions": (gguf_bytes((), [tensor_info("a", (1,) * 5, 0, 0)], bytes(16)), "5 dimensions"),
    "dimension 0": (gguf_bytes((), [tensor_info("a", (0, 4), 0, 0)], bytes(16)), "impossible shape"),
    "huge": (gguf_bytes((), [tensor_info("a", (1 << 40, 1 << 40), 0, 0)], bytes(16)), "impossible shape"),
    "type": (gguf_bytes((), [tensor_info("a", (4,), 99, 0)], bytes(16)), "type 99 (unknown)"),
    "removed type": (gguf_bytes((), [tensor_info("a", (32,), 31, 0)], bytes(18)), "type 31 (q4_0_4_4)"),
    "part of a block": (gguf_bytes((), [tensor_info("a", (2, 40), 8, 0)], bytes(99)), "blocks of 32 (q8_0)"),
    "not aligned": (gguf_bytes((), [tensor_info("a", (4,), 0, 4)], bytes(32)), "32 does not divide"),
    "overlap": (gguf_bytes((), [ONE, tensor_info("b", (4,), 0, 0)], bytes(64)), "tensor b overlaps a"),
    "gap": (gguf_bytes((), [ONE, tensor_info("b", (4,), 0, 64)], bytes(128)), "tensor b leaves a gap behind a"),
    "offset": (gguf_bytes((), [tensor_info("a", (4,), 0, 1 << 62)], bytes(16)), "leaves a gap"),
    "cut short": (gguf_bytes((), [ONE, tensor_info("b", (4,), 0, 32)], bytes(40)), "before its tensor b does"),
    "web page": (b"<!DOCTYPE html><html>", "web page"),
}


@pytest.mark.parametrize("data, problem", BROKEN.values(), ids=BROKEN)
def test_broken_headers(path, data, problem):
    """Each is refused by name, and no count or length takes memory first."""
    path.write_bytes(data)
    line = attempt(lambda: read_gguf(path))
    assert line and problem in line, line


def test_last_tensor_may_lack_its_padding(path):
    path.write_bytes(gguf_bytes((), [ONE, tensor_info("b", (1,), 0, 32)], bytes(36)))
    assert read_gguf(path).tensors["b"].num_bytes == 4


def test_descriptions_may_hold_any_bytes(path):
    """A description in Latin-1 changes no answer; a model with one is not refused."""
    path.write_bytes(gguf_bytes([text("general.author") + struct.pack("<I", 8) + text(b"Andr\xe9")]))
    assert read_metadata(path) == {"general.author": "Andr\ufffd"}


def test_a_cut_at_any_byte_is_refused(path):
    """A download that stopped: wherever, it is said."""
    write_gguf(path, METADATA, {"a.weight": (0, (3,), b"abcdefghijkl"), "b.weight": (8, (2, 32), Q8_ROWS)})
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert attempt(lambda: read_gguf(path)), size


@few
@given(st.data())
def test_any_header_is_read_or_refused(path, data):
    """Bytes changed anywhere in a header: a result or one line, within limits of time and memory."""
    write_gguf(path, METADATA, {"a.weight": (0, (3,), b"abcdefghijkl"), "b.weight": (8, (2, 32), Q8_ROWS)})
    changed = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed) - 9))
        new = data.draw(st.sampled_from([b"\xff", b"\x00", b"\xff" * 8, bytes(8), b"\x09", item(10, 1 << 62)]))
        changed[at : at + len(new)] = new
    path.write_bytes(changed)
    attempt(lambda: read_gguf(path))
