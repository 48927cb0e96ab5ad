"""safetensors headers -> name: (file, offset, shape, dtype). Every number is checked before anything is allocated.

Only headers are read here; snapshot/reader.py reads the bytes they point to.
"""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from errors import Refused, shorten, show
from kernels.formats import DTYPES
from snapshot.config import parse_json_object, read_json_object
from snapshot.reader import open_file

INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
MAX_DIMENSIONS = 64  # what torch can hold; it also bounds the work of multiplying them
MAX_COUNT = (1 << 63) - 1
ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()} | {"U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1}
FORMATS_KEY = "colibri.formats"  # metadata of a container: JSON, names or their beginnings -> weight formats
# Published snapshots say how many shards there are; the C engine's converter numbers from 0 and does not. Its out-mtp-
# and out-idx- files are numbered apart from the main series, and a model works without them.
SHARD = re.compile(r"(?P<stem>.*)(?P<number>[0-9]{5})(?P<tail>-of-[0-9]{5}\.safetensors)")
OUT_SHARD = re.compile(r"(?P<stem>out-)(?P<number>[0-9]{5})(?P<tail>\.safetensors)")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: `offset` and `num_bytes` count from the start of the file."""

    name: str
    path: Path
    offset: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def item_bytes(self):
        return ITEM_BYTES[self.dtype]


class TensorIndex:
    """All tensors of a snapshot by name.

    `shards` says in words which of a numbered series are there, `has_gap` that one is not. `unlisted` are files that
    were taken because they stand in the folder, not because an index file names them. `stamps` holds, for each file
    that has one, its table of weight formats.
    """

    def __init__(self, folder, entries, shards="", has_gap=False, unlisted=(), stamps=None):
        self.folder, self.entries, self.stamps = folder, entries, stamps or {}
        self.shards, self.has_gap, self.unlisted = shards, has_gap, unlisted
        self.used = set()  # files of which a tensor was asked for
        self.layers = {".".join(name.split(".")[:3]) + "." for name in entries}  # "model.layers.7."

    def __contains__(self, name):
        return name in self.entries

    def has_layer(self, prefix):
        """Whether any tensor of a layer is there; `prefix` as the family's layer_prefix gives it."""
        return prefix in self.layers

    def dtype_of(self, name):
        """The dtype of a tensor, None where it is missing."""
        return self.entries[name].dtype if name in self.entries else None

    def declared_format(self, name):
        """The format that the file of a tensor says it has, for it by name or for all that begin like it; or None."""
        stamps, parts = self.stamps.get(self.entries[name].path, {}), name.split(".")
        names = [name, *(".".join(parts[:n]) + "." for n in range(len(parts) - 1, 0, -1))]
        return next((stamps[name] for name in names if name in stamps), None)

    def find_entry(self, name):
        """The entry of a tensor, whatever its dtype and shape; refuses a missing name."""
        entry = self.entries.get(name)
        if entry is None:
            raise self.incomplete(f"tensor {name} is missing")
        self.used.add(entry.path)
        return entry

    def find_checked(self, name, shape, dtypes=tuple(DTYPES)):
        """The entry of a tensor, its shape as expected; refuses a missing name, another shape, an unread dtype."""
        entry = self.find_entry(name)
        if entry.dtype not in dtypes:
            dtype = shorten(entry.dtype)
            raise Refused(f"{entry.path}: tensor {name} has dtype {dtype}, expected {', '.join(dtypes)}")
        if entry.shape != tuple(shape):
            found = show(list(entry.shape))
            raise Refused(f"{entry.path}: tensor {name} has shape {found}, config.json asks for {list(shape)}")
        return entry

    def incomplete(self, what):
        """The refusal for something that is not there, with what is known of the shards."""
        shards = f" ({self.shards})" if self.shards else ""
        return Refused(f"{self.folder}: {what}{shards}; is the download complete?")

    def check_unused_files(self, mtp_prefix):
        """Once every tensor was asked for: refuse a gap in the shards that nobody noticed, and a file of another model.

        Names that begin with `mtp_prefix`, the MTP layer, may stand in a file of their own.
        """
        if self.has_gap:
            raise Refused(f"{self.folder}: a shard is missing ({self.shards}); is the download complete?")
        spare = {entry.path for name, entry in self.entries.items() if name.startswith(mtp_prefix)}
        for path in self.unlisted:
            if path not in self.used and path not in spare:
                raise Refused(f"{path}: holds no tensor of this model; move it out of the folder")


def read_index(folder):
    """The headers of every *.safetensors that belongs to the snapshot -> TensorIndex.

    With model.safetensors.index.json the files it lists are read, and each name must stand where it says; without it
    all *.safetensors of the folder are.
    """
    listing = folder / INDEX_FILE
    listed = os.path.lexists(listing)  # a link to nothing is a broken download, not an absent file
    weight_map = read_weight_map(listing) if listed else {}
    paths = check_listed(folder, weight_map) if listed else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise Refused(f"{folder}: holds no *.safetensors; SNAP must name a Hugging Face snapshot folder")
    entries, stamps = {}, {}
    for path in paths:
        found, metadata = read_header(path)
        stamps[path] = read_format_table(path, metadata)
        for name, entry in found.items():
            if name in entries:
                both = f"{entries[name].path.name} and {path.name}"
                raise Refused(f"{folder}: tensor {shorten(name)} stands in both {both}; remove one of them")
            entries[name] = entry
    for name, file in weight_map.items():
        if name not in entries or entries[name].path.name != file:
            raise Refused(f"{listing}: says {shorten(name)} is in {shorten(file)}, which does not hold it")
    shards, has_gap = describe_shards([path.name for path in paths])
    return TensorIndex(folder, entries, shards, has_gap, () if listed else tuple(paths), stamps)


def read_weight_map(listing):
    """The index file -> tensor name: file name. A file is a plain name, so nothing outside the folder is opened."""
    weight_map = read_json_object(listing).get("weight_map")
    if not isinstance(weight_map, dict):
        raise Refused(f"{listing}: weight_map must map tensor names to file names")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not is_plain(file):
            what = f"weight_map puts {shorten(name)} in {show(file)}"
            raise Refused(f"{listing}: {what}, expected the name of a *.safetensors file beside it")
    return weight_map


def is_plain(file):
    """Whether a name leads nowhere but to a *.safetensors in the folder itself."""
    return file.isprintable() and file.endswith(".safetensors") and Path(file).name == file


def check_listed(folder, weight_map):
    """The files of an index file, all there; a missing one is told with a tensor that is missing with it."""
    paths = [folder / name for name in sorted(set(weight_map.values()))]
    absent = [path.name for path in paths if not os.path.exists(path)]
    if absent:
        there = f"{len(paths) - len(absent)} of {len(paths)} files are there"
        name = next(name for name, file in weight_map.items() if file == absent[0])
        what = f"{shorten(absent[0])} is missing ({there}) and with it tensor {shorten(name)}"
        raise Refused(f"{folder}: {what}; download it again")
    return paths


def describe_shards(names):
    """File names -> (which of a numbered series are there, in words; whether one is not). The first gap is told."""
    series, words = {}, ""
    for name in names:
        if match := SHARD.fullmatch(name) or OUT_SHARD.fullmatch(name):
            series.setdefault((match["stem"], match["tail"]), set()).add(int(match["number"]))
    for (stem, tail), numbers in series.items():
        wanted = range(1, int(tail[4:9]) + 1) if tail.startswith("-of-") else range(max(numbers) + 1)
        absent = sorted(set(wanted) - numbers)
        if absent:
            return f"{len(numbers)} of {len(wanted)} shards are there, {stem}{absent[0]:05d}{tail} is not", True
        if len(wanted) > 1:
            words = f"{len(wanted)} shards are there, {stem}{wanted[0]:05d}{tail} to {stem}{wanted[-1]:05d}{tail}"
    return words, False


def read_header(path):
    """One file's header -> (name: TensorEntry, its metadata). The file must be exactly as long as its header says."""
    try:
        with open(open_file(path), "rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            length_field = file.read(8)
            header_bytes = int.from_bytes(length_field, "little")
            if header_bytes > MAX_HEADER_BYTES:
                what = f"says its header has {header_bytes} bytes, above the limit of {MAX_HEADER_BYTES}"
                raise Refused(f"{path}: {what}; it is no safetensors file, or broken: download it again")
            if len(length_field) < 8 or header_bytes > file_bytes - 8:
                raise Refused(f"{path}: is shorter than its header says ({file_bytes} bytes); download it again")
            data = file.read(header_bytes)
    except FileNotFoundError:
        raise Refused(f"{path}: no such file; the snapshot is incomplete") from None
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from None
    header = parse_json_object(data, f"{path}: the safetensors header")
    metadata = header.pop("__metadata__", None)
    metadata = metadata if isinstance(metadata, dict) else {}
    data_start = 8 + header_bytes
    entries = {name: parse_entry(path, name, fields, data_start) for name, fields in header.items()}
    end, cut = data_start, None  # cut: the first tensor that the file does not hold whole
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.num_bytes)):
        if entry.offset != end:
            what = f"tensor {shorten(entry.name)} overlaps its neighbour or leaves a gap"
            raise Refused(f"{path}: {what}; the file is broken, download it again")
        end = entry.offset + entry.num_bytes
        cut = cut or (end > file_bytes and entry.name)
    if end != file_bytes:
        word = "shorter" if cut else "longer"
        where = f", it ends before tensor {shorten(cut)} does" if cut else ""
        what = f"is {word} than its header says ({file_bytes} bytes, {end} expected{where})"
        raise Refused(f"{path}: {what}; download it again")
    return entries, metadata


def read_format_table(path, metadata):
    """The table of weight formats in a file's metadata: names, or their beginnings up to a dot -> format names."""
    text = metadata.get(FORMATS_KEY)
    if text is None:
        return {}
    subject = f"{path}: {FORMATS_KEY} of the metadata"
    stamp = parse_json_object(text.encode("utf-8", "replace") if isinstance(text, str) else b"", subject)
    if not all(isinstance(fmt, str) for fmt in stamp.values()):
        raise Refused(f"{subject} must map names to weight formats")
    return stamp


def parse_entry(path, name, fields, data_start):
    """One header entry -> TensorEntry; refuses offsets and shapes that do not fit each other."""

    def refuse(problem):
        raise Refused(f"{path}: tensor {shorten(name)} {problem}; the file is broken, download it again")

    if not is_unicode(name):
        raise Refused(f"{path}: the name of tensor {show(name)} is not valid Unicode; the file is broken")
    fields = fields if isinstance(fields, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        refuse("lacks a dtype, a shape or data_offsets")
    # type() and not isinstance: true and false are no numbers here.
    whole = all(type(n) is int and 0 <= n <= MAX_COUNT for n in shape + offsets)
    if not whole or len(shape) > MAX_DIMENSIONS or offsets[1] < offsets[0]:
        refuse(f"has an impossible shape or offsets ({show(shape)}, {show(offsets)})")
    size, num_bytes = math.prod(shape), offsets[1] - offsets[0]
    if size > MAX_COUNT:
        refuse(f"has an impossible shape: {show(shape)} is beyond 2^63 elements")
    if dtype in ITEM_BYTES and size * ITEM_BYTES[dtype] != num_bytes:
        refuse(f"of shape {show(shape)} and dtype {dtype} does not fill its {num_bytes} bytes")
    return TensorEntry(name, path, data_start + offsets[0], num_bytes, dtype, tuple(shape))


def is_unicode(text):
    """False for a text with half a character, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
