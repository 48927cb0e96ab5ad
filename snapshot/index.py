"""safetensors headers -> name: (file, offset, shape, dtype). Every number is checked before anything is allocated.

Only headers are read here; snapshot/reader.py reads the bytes they point to.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from kernels.packing import DTYPES
from snapshot.config import read_json
from snapshot.errors import Refused

INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
SHARD = re.compile(r"^(.*?)-?(\d{5})-of-(\d{5})\.safetensors$")


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
        return DTYPES[self.dtype].itemsize


class TensorIndex:
    """All tensors of a snapshot by name."""

    def __init__(self, folder, entries):
        self.folder, self.entries = folder, entries

    def __contains__(self, name):
        return name in self.entries

    def any_with_prefix(self, prefix):
        return any(name.startswith(prefix) for name in self.entries)

    def find(self, name, shape):
        """The entry of a tensor, its shape as expected; refuses a missing name, another shape, an unread dtype."""
        entry = self.entries.get(name)
        if entry is None:
            raise Refused(f"{self.folder}: tensor {name} is missing; is the download complete?")
        if entry.dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise Refused(f"{entry.path}: tensor {name} has dtype {entry.dtype}, this version reads {known}")
        if entry.shape != tuple(shape):
            raise Refused(
                f"{entry.path}: tensor {name} has shape {list(entry.shape)}, config.json asks for {list(shape)}"
            )
        return entry


def read_index(folder):
    """The headers of every *.safetensors that belongs to the snapshot -> TensorIndex.

    With model.safetensors.index.json the files it lists are read, and each name must stand where it says; without it
    all *.safetensors of the folder are.
    """
    listing = folder / INDEX_FILE
    weight_map = None
    if listing.exists():
        weight_map = read_json(listing).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise Refused(f"{listing}: weight_map must map tensor names to file names")
        paths = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise Refused(f"{folder}: holds no *.safetensors; SNAP must name a Hugging Face snapshot folder")
    check_shards(folder, [path.name for path in paths])
    entries = {}
    for path in paths:
        for name, entry in read_header(path).items():
            if name in entries:
                raise Refused(f"{folder}: tensor {name} stands in both {entries[name].path.name} and {path.name}")
            entries[name] = entry
    for name, file in (weight_map or {}).items():
        if name not in entries or entries[name].path.name != file:
            raise Refused(f"{listing}: says {name} is in {file}, which does not hold it")
    return TensorIndex(folder, entries)


def check_shards(folder, names):
    """A numbered series must be whole: name the first number that is absent, and how many there should be."""
    series = {}
    for name in names:
        if match := SHARD.match(name):
            stem, number, total = match.groups()
            series.setdefault((stem, int(total)), set()).add(int(number))
    for (stem, total), numbers in series.items():
        absent = sorted(set(range(1, total + 1)) - numbers)
        if absent:
            raise Refused(
                f"{folder}: shard {stem}-{absent[0]:05d}-of-{total:05d}.safetensors is missing "
                f"({len(numbers)} of {total} shards are there)"
            )


def read_header(path):
    """One file's header -> name: TensorEntry. The file must be exactly as long as its header says."""
    try:
        file_bytes = path.stat().st_size
        with open(path, "rb") as file:
            length_field = file.read(8)
            header_bytes = int.from_bytes(length_field, "little")
            if len(length_field) < 8 or header_bytes > file_bytes - 8:
                raise Refused(f"{path}: is shorter than its header says ({file_bytes} bytes); download it again")
            if header_bytes > MAX_HEADER_BYTES:
                raise Refused(f"{path}: header of {header_bytes} bytes is above the limit of {MAX_HEADER_BYTES}")
            header = json.loads(file.read(header_bytes))
    except FileNotFoundError:
        raise Refused(f"{path}: no such file; the snapshot is incomplete") from None
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise Refused(f"{path}: is not a safetensors file (its header is not JSON)") from None
    if not isinstance(header, dict):
        raise Refused(f"{path}: is not a safetensors file (its header is not a JSON object)")
    header.pop("__metadata__", None)
    data_start = 8 + header_bytes
    entries = {name: read_entry(path, name, fields, data_start) for name, fields in header.items()}
    end = data_start
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.num_bytes)):
        if entry.offset != end:
            raise Refused(f"{path}: tensor {entry.name} overlaps its neighbour or leaves a gap")
        end = entry.offset + entry.num_bytes
    if end != file_bytes:
        word = "shorter" if file_bytes < end else "longer"
        raise Refused(f"{path}: is {word} than its header says ({file_bytes} bytes, {end} expected); download it again")
    return entries


def read_entry(path, name, fields, data_start):
    """One header entry -> TensorEntry; refuses offsets and shapes that do not fit each other."""
    try:
        dtype, shape, (start, stop) = fields["dtype"], fields["shape"], fields["data_offsets"]
        whole = [start, stop, *shape]
    except (TypeError, KeyError, ValueError):
        raise Refused(f"{path}: tensor {name} lacks a dtype, a shape or data_offsets") from None
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in whole) or stop < start:
        raise Refused(f"{path}: tensor {name} has an impossible shape or offsets ({shape}, {[start, stop]})")
    if not isinstance(dtype, str):
        raise Refused(f"{path}: tensor {name} has no dtype")
    if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != stop - start:
        raise Refused(
            f"{path}: tensor {name} of shape {shape} and dtype {dtype} does not fill its {stop - start} bytes"
        )
    return TensorEntry(name, path, data_start + start, stop - start, dtype, tuple(shape))
