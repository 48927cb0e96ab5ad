"""TensorIndex: safetensors headers -> name: (file, offset, shape, dtype), checked before anything is allocated.

Only headers are read here; snapshot/reader.py reads the tensors.
"""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from errors import Refused, shorten, show
from kernels.formats import DTYPES
from machine.fields import to_text
from snapshot.folder import list_names, no_weights, own_files
from snapshot.foreign import ADVICE, describe_quantized
from snapshot.reader import open_checked, parse_json_object, read_file, read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_DIMENSIONS = 64  # torch's limit; it also bounds the work of multiplying them
MAX_COUNT = (1 << 63) - 1
ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()} | {"U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1}
FORMATS_KEY = "colibri.formats"  # metadata of a container: JSON, names or prefixes of names -> weight formats
# Published shards carry their total; those of the C engine's converter are numbered from 0 and do not. Its out-mtp- and
# out-idx- files have numbers of their own, and a model works without them.
SHARD = re.compile(r"(?P<stem>.*)(?P<number>[0-9]{5})(?P<tail>-of-[0-9]{5}\.safetensors)")
OUT_SHARD = re.compile(r"(?P<stem>out-)(?P<number>[0-9]{5})(?P<tail>\.safetensors)")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The byte range of one tensor; `offset` counts from the start of the file."""

    name: str
    path: Path
    offset: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        """Bytes that the tensor must be aligned to in memory; blocks of a GGUF need none."""
        return ITEM_BYTES.get(self.dtype, 1)


@dataclass
class TensorIndex:
    """All tensors of a snapshot by name."""

    folder: Path
    entries: dict[str, TensorEntry]
    formats: dict[Path, dict[str, str]]  # the weight formats that each file declares
    shards: str  # for error messages: which of a numbered series are there
    has_gap: bool  # a shard of the series is missing
    unlisted: tuple[Path, ...]  # files that are read, but named neither by an index file nor by a rule
    not_read: str = ""  # files that are not read, and why, a line for the user
    used_names: set[str] = field(default_factory=set)  # tensors that were looked up
    # kv_b where it is split into keys, transposed, and values, by the name that it has in one tensor
    kv_parts: dict[str, tuple[TensorEntry, TensorEntry]] = field(default_factory=dict)
    config_name: ClassVar[str] = "config.json"  # what says how the tensors must be
    matrix_dtypes: ClassVar[tuple[str, ...]] = tuple(DTYPES)  # of matrices without scales beside them

    def __post_init__(self) -> None:
        self.layer_prefixes = {".".join(name.split(".")[:3]) + "." for name in self.entries}

    def __contains__(self, name: str) -> bool:
        return name in self.entries or name in self.kv_parts

    @property
    def subject(self) -> Path:
        """What messages begin with: the folder, or the file that a model is."""
        return self.folder

    def label(self, name: str) -> str:
        """A tensor's name in messages."""
        return name

    def config_bytes(self) -> bytes:
        """What says how the tensors must be, to tell models apart."""
        return read_file(self.folder / "config.json")

    def has_layer(self, prefix: str) -> bool:
        """True if any tensor of a layer is there; `prefix` as from Family.layer_prefix."""
        return prefix in self.layer_prefixes

    def declared_format(self, name: str) -> str | None:
        """The format that the metadata declares for a tensor, by its name or the longest prefix up to a dot."""
        formats, parts = self.formats[self.entries[name].path], name.split(".")
        names = [name, *(".".join(parts[:n]) + "." for n in range(len(parts) - 1, 0, -1))]
        return next((formats[name] for name in names if name in formats), None)

    def find_entry(self, name: str) -> TensorEntry:
        """The entry of a tensor of any dtype and shape; refuses a missing name."""
        entry = self.entries.get(name)
        if entry is None:
            self.refuse_quantized(name)
            raise self.incomplete(f"tensor {self.label(name)} is missing")
        self.used_names.add(name)
        return entry

    def refuse_quantized(self, name: str) -> None:
        """Refuse a matrix that other tensors beside it show to be quantized in a way that this engine does not read."""
        if problem := describe_quantized(self.entries, name):
            raise Refused(f"{self.subject}: tensor {name} is {problem}; {ADVICE}")

    def refuse_blocks(self, entry: TensorEntry) -> None:
        """Refuse a tensor of a block type that no kernel computes with; a GGUF may have them."""

    def find_checked(self, name: str, shape: Sequence[int], dtypes: Sequence[str] = tuple(DTYPES)) -> TensorEntry:
        """The entry of a tensor of this shape and one of these dtypes; refuses others and a missing name."""
        entry = self.find_entry(name)
        if entry.dtype not in dtypes:
            self.refuse_blocks(entry)
            dtype = shorten(entry.dtype)
            raise Refused(f"{entry.path}: tensor {self.label(name)} has dtype {dtype}, expected {', '.join(dtypes)}")
        if entry.shape != tuple(shape):
            found = show(list(entry.shape))
            asked = f"{self.config_name} asks for {list(shape)}"
            raise Refused(f"{entry.path}: tensor {self.label(name)} has shape {found}, {asked}")
        return entry

    def incomplete(self, problem: str) -> Refused:
        """The error for something missing, with what is known of the shards."""
        known = "; ".join(filter(None, (self.shards, self.not_read)))
        return Refused(f"{self.subject}: {problem}{f' ({known})' if known else ''}; is the download complete?")

    def check_unused_files(self, mtp_prefix: str) -> None:
        """After all look-ups, refuse a missing shard without needed tensors, and a file of another model.

        The MTP layer, names that begin with `mtp_prefix`, may be in a file of its own and unused.
        """
        if self.has_gap:
            raise Refused(f"{self.folder}: a shard is missing ({self.shards}); is the download complete?")
        spare = {entry.path for name, entry in self.entries.items() if name.startswith(mtp_prefix)}
        used_paths = {self.entries[name].path for name in self.used_names}
        for path in self.unlisted:
            if path not in used_paths and path not in spare:
                raise Refused(f"{path}: holds no tensor of this model; move it out of the folder")


def read_index(folder: Path) -> TensorIndex:
    """Read the headers of the *.safetensors of a snapshot.

    As in transformers a model.safetensors is the whole model, else it is the files that model.safetensors.index.json
    lists, and each name must be where it says. Without both, as in containers, it is all *.safetensors of the folder.
    """
    listing, single = folder / INDEX_FILE, folder / SINGLE_FILE
    # lexists: a dangling link is a broken download, not an absent file.
    is_listed = os.path.lexists(listing)
    weight_map = read_weight_map(listing) if is_listed else {}
    there = own_files(folder, ".safetensors")
    unlisted: list[Path] = []
    rule = f"not in {INDEX_FILE}"
    if os.path.lexists(single) and SINGLE_FILE not in weight_map.values():
        paths, weight_map, rule = [single], {}, f"{SINGLE_FILE} is the whole model"
        there += [listing] if is_listed else []
    elif is_listed:
        paths = list_files(folder, weight_map)
    else:
        paths = unlisted = there
    if not paths:
        raise no_weights(folder)
    strays = [path.name for path in there if path not in paths]
    not_read = f"not read: {list_names(strays)} ({rule})" if strays else ""
    entries: dict[str, TensorEntry] = {}
    formats = {}
    for path in paths:
        found, metadata = read_header(path)
        formats[path] = parse_formats(path, metadata)
        for name, entry in found.items():
            if name in entries:
                both = f"{entries[name].path.name} and {path.name}"
                raise Refused(f"{folder}: tensor {shorten(name)} is in both {both}; remove one of them")
            entries[name] = entry
    for name, file in weight_map.items():
        if name not in entries or entries[name].path.name != file:
            raise Refused(f"{listing}: says {shorten(name)} is in {shorten(file)}, which does not hold it")
    shards, has_gap = describe_shards([path.name for path in paths])
    return TensorIndex(folder, entries, formats, shards, has_gap, tuple(unlisted), not_read)


def read_weight_map(listing: Path) -> dict[str, str]:
    """The index file -> {tensor name: file name}. Only plain names: nothing outside the folder is opened."""
    weight_map = read_json_object(listing).get("weight_map")
    if not isinstance(weight_map, dict):
        raise Refused(f"{listing}: weight_map must map tensor names to file names")
    for name, file in weight_map.items():
        is_plain = isinstance(file, str) and file.isprintable() and Path(file).name == file
        if not is_plain or not file.endswith(".safetensors"):
            problem = f"weight_map puts {shorten(name)} in {show(file)}"
            raise Refused(f"{listing}: {problem}, expected the name of a *.safetensors file beside it")
    return weight_map


def list_files(folder: Path, weight_map: dict[str, str]) -> list[Path]:
    """The files of an index file. Refuses a missing one, and names a tensor that it should hold."""
    paths = [folder / name for name in sorted(set(weight_map.values()))]
    absent = [path.name for path in paths if not os.path.exists(path)]
    if absent:
        there = f"{len(paths) - len(absent)} of {len(paths)} files are there"
        name = next(name for name, file in weight_map.items() if file == absent[0])
        problem = f"{shorten(absent[0])} is missing ({there}) and with it tensor {shorten(name)}"
        raise Refused(f"{folder}: {problem}; download it again")
    return paths


def describe_shards(names: list[str]) -> tuple[str, bool]:
    """File names -> (which shards of a numbered series are there, whether one is missing: the first is named)."""
    series: dict[tuple[str, str], set[int]] = {}
    summary = ""
    for name in names:
        if match := SHARD.fullmatch(name) or OUT_SHARD.fullmatch(name):
            series.setdefault((match["stem"], match["tail"]), set()).add(int(match["number"]))
    for (stem, tail), numbers in series.items():
        wanted = range(1, int(tail[4:9]) + 1) if tail.startswith("-of-") else range(max(numbers) + 1)
        absent = sorted(set(wanted) - numbers)
        if absent:
            return f"{len(numbers)} of {len(wanted)} shards are there, {stem}{absent[0]:05d}{tail} is not", True
        if len(wanted) > 1:
            summary = f"{len(wanted)} shards are there, {stem}{wanted[0]:05d}{tail} to {stem}{wanted[-1]:05d}{tail}"
    return summary, False


def read_header(path: Path) -> tuple[dict[str, TensorEntry], dict[str, Any]]:
    """One file -> ({name: TensorEntry}, metadata). The file must be exactly as long as its header says."""
    with open_checked(path, "the snapshot is incomplete") as (file, file_bytes):
        length_field = file.read(8)
        header_bytes = int.from_bytes(length_field, "little")
        if header_bytes > MAX_HEADER_BYTES:
            problem = f"says its header has {header_bytes} bytes, above the limit of {MAX_HEADER_BYTES}"
            raise Refused(f"{path}: {problem}; it is no safetensors file, or broken: download it again")
        if len(length_field) < 8 or header_bytes > file_bytes - 8:
            raise Refused(f"{path}: is shorter than its header says ({file_bytes} bytes); download it again")
        data = file.read(header_bytes)
    header = parse_json_object(data, f"{path}: the safetensors header")
    metadata = header.pop("__metadata__", None)
    metadata = metadata if isinstance(metadata, dict) else {}
    data_start = 8 + header_bytes
    entries = {name: parse_entry(path, name, fields, data_start) for name, fields in header.items()}
    end, cut_name = data_start, None
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.num_bytes)):
        if entry.offset != end:
            problem = f"tensor {shorten(entry.name)} overlaps its neighbor or leaves a gap"
            raise Refused(f"{path}: {problem}; the file is broken, download it again")
        end = entry.offset + entry.num_bytes
        if end > file_bytes:
            cut_name = cut_name or shorten(entry.name)  # the first tensor that the file does not hold whole
    if end != file_bytes:
        word, where = ("shorter", f", it ends before tensor {cut_name} does") if end > file_bytes else ("longer", "")
        problem = f"is {word} than its header says ({file_bytes} bytes, {end} expected{where})"
        raise Refused(f"{path}: {problem}; download it again")
    return entries, metadata


def parse_formats(path: Path, metadata: dict[str, Any]) -> dict[str, str]:
    """The weight formats that a file declares: tensor names, or prefixes up to a dot -> format names."""
    text = metadata.get(FORMATS_KEY)
    if text is None:
        return {}
    subject = f"{path}: {FORMATS_KEY} of the metadata"
    formats = parse_json_object(text.encode("utf-8", "replace") if isinstance(text, str) else b"", subject)
    if not all(isinstance(fmt, str) for fmt in formats.values()):
        raise Refused(f"{subject} must map names to weight formats")
    return formats


def parse_entry(path: Path, name: str, fields: Any, data_start: int) -> TensorEntry:
    """One header entry -> TensorEntry; refuses offsets and shapes that contradict each other."""

    def refuse(problem: str) -> NoReturn:
        raise Refused(f"{path}: tensor {shorten(name)} {problem}; the file is broken, download it again")

    if to_text(name) is None:
        raise Refused(f"{path}: the name of tensor {show(name)} is not valid Unicode; the file is broken")
    fields = fields if isinstance(fields, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        refuse("lacks a dtype, a shape or data_offsets")
    # type() instead of isinstance: true and false are no numbers.
    whole = all(type(n) is int and 0 <= n <= MAX_COUNT for n in shape + offsets)
    if not whole or len(shape) > MAX_DIMENSIONS or offsets[1] < offsets[0]:
        refuse(f"has an impossible shape or offsets ({show(shape)}, {show(offsets)})")
    size, num_bytes = math.prod(shape), offsets[1] - offsets[0]
    if size > MAX_COUNT:
        refuse(f"has an impossible shape: {show(shape)} is beyond 2^63 elements")
    if dtype in ITEM_BYTES and size * ITEM_BYTES[dtype] != num_bytes:
        refuse(f"of shape {show(shape)} and dtype {dtype} does not fill its {num_bytes} bytes")
    return TensorEntry(name, path, data_start + offsets[0], num_bytes, dtype, tuple(shape))
