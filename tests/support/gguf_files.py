"""Writes GGUF files for tests, from values and tensors, and with any field wrong."""

import struct
from dataclasses import dataclass
from typing import Any

from snapshot.gguf_files import read_model

CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TYPES = {bool: 7, int: 4, float: 6, str: 8, list: 9}


@dataclass
class Typed:
    """A metadata value of a given type; of a list, the type of its items."""

    kind: int
    value: Any


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def item(kind, value):
    return text(value) if kind == 8 else struct.pack("<" + CODES[kind], value)


def typed_value(value):
    """The type and the bytes of a metadata value."""
    kind, value = (value.kind, value.value) if isinstance(value, Typed) else (None, value)
    if isinstance(value, list):
        kind = TYPES[type(value[0]) if value else str] if kind is None else kind
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(item(kind, each) for each in value)
    kind = TYPES[type(value)] if kind is None else kind
    return struct.pack("<I", kind) + item(kind, value)


def pair(key, value):
    return text(key) + typed_value(value)


def tensor_info(name, shape, kind, offset):
    """One tensor; shape rows first, kind the number of its type."""
    dimensions = struct.pack(f"<{len(shape)}q", *reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + dimensions + struct.pack("<IQ", kind, offset)


def gguf_bytes(pairs=(), infos=(), data=b"", version=3, counts=None, alignment=32):
    """A file from encoded pairs and tensor infos; counts: other numbers of tensors and pairs than there are."""
    head = b"GGUF" + struct.pack("<I2q", version, *(counts or (len(infos), len(pairs))))
    head += b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data


def write_gguf(path, metadata, tensors, alignment=32):
    """A whole file. tensors: name -> (number of its type, shape rows first, bytes)."""
    infos, data = [], b""
    for name, (kind, shape, content) in tensors.items():
        data += bytes(-len(data) % alignment)
        infos.append(tensor_info(name, shape, kind, len(data)))
        data += content
    pairs = [pair(key, value) for key, value in metadata.items()]
    path.write_bytes(gguf_bytes(pairs, infos, data, alignment=alignment))
    return path


def write_dequantized(source, path):
    """A GGUF with all tensors of a model in float32, as the package gguf dequantizes them. source: its first file."""
    import gguf
    import numpy

    numbers = {kind.name.lower(): kind for kind in gguf.GGMLQuantizationType}
    model = read_model(source)
    tensors = {}
    for name, entry in model.tensors.items():
        with open(entry.path, "rb") as file:
            file.seek(entry.offset)
            data = numpy.frombuffer(file.read(entry.num_bytes), numpy.uint8)
        kind = numbers[entry.dtype.lower()]
        values = gguf.quants.dequantize(data.reshape(*entry.shape[:-1], -1), kind)
        tensors[name] = 0, entry.shape, values.astype("<f4").tobytes()
    metadata = {key: value for key, value in model.metadata.items() if not key.startswith("split.")}
    return write_gguf(path, metadata, tensors)
