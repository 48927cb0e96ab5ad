"""The header of one GGUF file -> its metadata and tensors, checked before anything is allocated.

"GGUF", version, number of tensors, number of pairs    4, 4, 8, 8 bytes, little-endian
pairs: key, type, value                                 metadata
tensors: name, number of dimensions, dimensions (columns first), type, offset
padding, then the data: offsets count from its start
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from errors import Refused, shorten, show
from snapshot.gguf_types import GGUF_TYPES, NOT_IN_FILES
from snapshot.index import MAX_COUNT, TensorEntry
from snapshot.reader import open_checked

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # of one layout
MAX_PAIRS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_ITEMS = 1 << 22  # in the arrays of a file; the largest vocabularies have 262,144 tokens and twice as many merges
MAX_KEY_BYTES = 1 << 16
MAX_NAME_BYTES = 63  # of a tensor; llama.cpp's limit
MAX_HEADER_BYTES = 400_000_000
MIN_PAIR_BYTES, MIN_TENSOR_BYTES = 13, 24
READ_BYTES = 1 << 20
# Value types by number: how struct reads a scalar.
SCALARS = dict(enumerate("B b H h I i f ? ".split(" "))) | {10: "Q", 11: "q", 12: "d"}
BOOL, STRING, ARRAY = 7, 8, 9
MIN_ITEM_BYTES = {number: struct.calcsize(code) for number, code in SCALARS.items() if code} | {STRING: 8}
ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32
DESCRIPTIONS = "general."  # begins the keys of texts that change no answer


@dataclass(frozen=True, slots=True)
class GgufFile:
    """One file. Tensors have the names of the file; shapes are rows first, as in safetensors."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]


def read_metadata(path: Path) -> dict[str, Any]:
    """The key/value pairs of a GGUF file, of a split one those of its first shard: int, float, bool, str, or a list of
    one of them."""
    return read_gguf(path).metadata


def read_gguf(path: Path) -> GgufFile:
    """Read and check the header of a file; refused too if the file ends before its tensors do."""
    with open_checked(path, "SNAP must name a GGUF file or a snapshot folder", MAGIC) as (file, file_bytes):
        cursor = Cursor(path, file, file_bytes)
        if cursor.take(4, "the first four bytes") != MAGIC:
            raise Refused(f"{path}: is no GGUF file, it does not begin with {MAGIC.decode()}")
        version = cursor.number("I", "the version")
        if version and version & 0xFFFF == 0:
            raise Refused(f"{path}: is a big-endian GGUF file, which this engine does not read")
        if version not in VERSIONS:
            problem = f"is a GGUF file of version {version}, this engine reads 2 and 3"
            raise Refused(f"{path}: {problem}; take a newer file of the model")
        num_tensors = cursor.count("q", "the number of tensors", MIN_TENSOR_BYTES, MAX_TENSORS)
        num_pairs = cursor.count("q", "the number of key/value pairs", MIN_PAIR_BYTES, MAX_PAIRS)
        metadata = read_pairs(cursor, num_pairs)
        alignment = parse_alignment(path, metadata)
        infos = [read_tensor_info(cursor) for _ in range(num_tensors)]
        data_start = -(-cursor.offset // alignment) * alignment
    return GgufFile(path, metadata, place_tensors(path, infos, data_start, alignment, file_bytes))


class Cursor:
    """Reads a header from its beginning, in blocks; refuses what lies past the end of the file."""

    def __init__(self, path: Path, file: BinaryIO, file_bytes: int):
        self.path = path
        self.file = file
        self.file_bytes = file_bytes
        self.data = bytearray()  # the file, as far as it is read
        self.offset = 0
        self.num_items = 0  # in arrays

    @property
    def left(self) -> int:
        return self.file_bytes - self.offset

    def refuse(self, problem: str) -> NoReturn:
        raise Refused(f"{self.path}: {problem}; the file is broken, download it again")

    def take(self, num_bytes: int, what: str) -> bytearray:
        end = self.offset + num_bytes
        if end > len(self.data):
            if num_bytes > self.left:
                problem = f"ends at byte {self.file_bytes}, inside {what}"
                raise Refused(f"{self.path}: {problem}; the download is cut short, download it again")
            if end > MAX_HEADER_BYTES:
                self.refuse(f"has a header above the limit of {MAX_HEADER_BYTES} bytes, at {what}")
            # As much again as there is: a header of any length is copied about once.
            self.data += self.file.read(max(end - len(self.data), len(self.data), READ_BYTES))
            if end > len(self.data):
                self.refuse(f"became shorter while it was read, inside {what}")
        data = self.data[self.offset : end]
        self.offset = end
        return data

    def number(self, code: str, what: str) -> Any:
        """One scalar, by struct's letter."""
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def count(self, code: str, what: str, item_bytes: int, limit: int) -> int:
        """A number of items of at least `item_bytes` bytes, which all must be in the file."""
        count: int = self.number(code, what)
        if not 0 <= count <= self.left // item_bytes:
            self.refuse(f"says {what} is {count}, of which {self.left} bytes hold at most {self.left // item_bytes}")
        if count > limit:
            self.refuse(f"says {what} is {count}, above the limit of {limit}")
        return count

    def text(self, what: str, limit: int = MAX_HEADER_BYTES, errors: str = "strict") -> str:
        length = self.count("Q", f"the length of {what}", 1, limit)
        try:
            return self.take(length, what).decode("utf-8", errors)
        except UnicodeDecodeError:
            self.refuse(f"{what} is not valid UTF-8")


def read_pairs(cursor: Cursor, num_pairs: int) -> dict[str, Any]:
    """The metadata; refuses a key that is empty or there twice."""
    metadata: dict[str, Any] = {}
    for i in range(num_pairs):
        key = cursor.text(f"the key of pair {i}", MAX_KEY_BYTES)
        if not key:
            cursor.refuse(f"pair {i} has an empty key")
        if key in metadata:
            cursor.refuse(f"holds the key {shorten(key)} twice")
        metadata[key] = read_value(cursor, shorten(key))
    return metadata


def read_value(cursor: Cursor, key: str) -> Any:
    """One value: a scalar, a text, or a list of either."""
    kind = cursor.number("I", f"the type of {key}")
    if kind == ARRAY:
        return read_array(cursor, key)
    if kind == STRING:
        return cursor.text(key, errors="replace" if key.startswith(DESCRIPTIONS) else "strict")
    if kind == BOOL:
        return cursor.number("B", key) != 0
    if kind not in MIN_ITEM_BYTES:
        cursor.refuse(f"{key} has the unknown value type {kind}")
    return cursor.number(SCALARS[kind], key)


def read_array(cursor: Cursor, key: str) -> list[Any]:
    """A list of scalars or texts. Arrays of arrays are written by nobody."""
    kind = cursor.number("I", f"the type of the items of {key}")
    if kind == ARRAY:
        cursor.refuse(f"{key} is an array of arrays")
    if kind not in MIN_ITEM_BYTES:
        cursor.refuse(f"{key} has items of the unknown value type {kind}")
    count = cursor.count("Q", f"the length of {key}", MIN_ITEM_BYTES[kind], MAX_ITEMS - cursor.num_items)
    cursor.num_items += count
    if kind == STRING:
        return read_texts(cursor, count, key)
    code = "B" if kind == BOOL else SCALARS[kind]
    values = list(struct.unpack(f"<{count}{code}", cursor.take(count * MIN_ITEM_BYTES[kind], key)))
    return [value != 0 for value in values] if kind == BOOL else values


def read_texts(cursor: Cursor, count: int, key: str) -> list[str]:
    """An array of texts: tokens, merges."""
    texts: list[str] = []
    try:
        while len(texts) < count:
            length = int.from_bytes(cursor.take(8, key), "little")
            texts.append(cursor.take(length, key).decode())
    except UnicodeDecodeError:
        cursor.refuse(f"{key}[{len(texts)}] is not valid UTF-8")
    return texts


def parse_alignment(path: Path, metadata: dict[str, Any]) -> int:
    """general.alignment, a power of two."""
    alignment = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment < 1 << 32 or alignment & (alignment - 1):
        raise Refused(f"{path}: {ALIGNMENT_KEY} is {show(alignment)}, expected a power of two")
    return alignment


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as the header describes it; `offset` counts from the start of the data."""

    name: str
    shape: tuple[int, ...]  # rows first
    dtype: str
    num_bytes: int
    offset: int


def read_tensor_info(cursor: Cursor) -> TensorInfo:
    """One tensor; refuses shapes and types without a size."""
    name = cursor.text("the name of a tensor", MAX_NAME_BYTES)
    what = f"tensor {name}"
    if not name or not name.isprintable():
        cursor.refuse(f"{show(name)} is no name of a tensor")
    num_dimensions = cursor.number("I", what)
    if not 1 <= num_dimensions <= 4:
        cursor.refuse(f"{what} has {num_dimensions} dimensions, expected 1 to 4")
    shape = tuple(cursor.number("q", what) for _ in range(num_dimensions))
    if min(shape) < 1 or math.prod(shape) > MAX_COUNT:
        cursor.refuse(f"{what} has the impossible shape {show(list(shape))}")
    number = cursor.number("I", what)
    if number not in GGUF_TYPES:
        known = NOT_IN_FILES.get(number, "unknown")
        problem = f"has the type {number} ({known}), which this engine does not read"
        raise Refused(f"{cursor.path}: {what} {problem}; take a newer file of the model")
    kind = GGUF_TYPES[number]
    if shape[0] % kind.values:
        cursor.refuse(f"{what} has {shape[0]} columns, which blocks of {kind.values} ({kind.name}) do not fill")
    num_bytes = math.prod(shape[1:]) * kind.row_bytes(shape[0])
    return TensorInfo(name, shape[::-1], kind.name, num_bytes, cursor.number("Q", what))


def place_tensors(
    path: Path, infos: list[TensorInfo], data_start: int, alignment: int, file_bytes: int
) -> dict[str, TensorEntry]:
    """Tensors by name with offsets from the start of the file; each begins where the one before it ends, aligned."""
    entries: dict[str, TensorEntry] = {}
    end, previous = 0, "the header"
    for info in sorted(infos, key=lambda info: (info.offset, info.name)):
        what = f"{path}: tensor {info.name}"
        advice = "the file is broken, download it again"
        if info.name in entries:
            raise Refused(f"{what} is there twice; {advice}")
        if info.offset % alignment:
            raise Refused(
                f"{what} begins at byte {info.offset} of the data, which {alignment} does not divide; {advice}"
            )
        expected = -(-end // alignment) * alignment
        if info.offset != expected:
            problem = "overlaps" if info.offset < expected else "leaves a gap behind"
            raise Refused(f"{what} {problem} {previous}; {advice}")
        end, previous = info.offset + info.num_bytes, info.name
        if data_start + end > file_bytes:
            problem = f"ends at byte {file_bytes}, before its tensor {info.name} does (byte {data_start + end})"
            raise Refused(f"{path}: {problem}; the download is cut short, download it again")
        offset = data_start + info.offset
        entries[info.name] = TensorEntry(info.name, path, offset, info.num_bytes, info.dtype, info.shape)
    return entries
