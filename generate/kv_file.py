"""KV cache files: conversations that survive a restart, one file for each name.

    conversations/<16 hex digits of config.json, names and sizes of the files>/<of the name>-<of the weights>.kv

in the user's cache folder. A file is a line of JSON, which binds the model, its weights, how it computes and the shapes
of a position, and after it a record for each turn:

    first, count   two little-endian 64-bit numbers: the record holds positions first .. first + count and replaces
                   what earlier records hold from `first` on
    ids            count 32-bit numbers
    rows           float32: for each layer the latents [count, width], then all rotated keys, then all index keys;
                   with GQA for each layer the keys, then all values
    digest         BLAKE2b, 32 bytes, of the digest before (of the first record: of the line) and of all the above

A turn appends a record, so a crash loses that turn at most: a record that is cut off, or whose digest differs, ends the
file. The MTP layer is not saved, it starts empty. A file that does not match is refused with the reason and overwritten
by the next turn; every size is checked before anything is read.
"""

import hashlib
import json
import os
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from errors import Refused, shorten
from experts.usage import file_sizes, identify
from forward.kv_cache import KV_DTYPES, KvCache, position_bytes
from kernels.dispatch import all_finite
from load.model import LoadedModel
from machine.files import atomic_write
from snapshot.reader import open_file, parse_json_object
from text.prompt import shared_prefix_length

VERSION = 1
DIGEST_BYTES = 32
MAX_LINE_BYTES = 1 << 16
BOUNDS = struct.Struct("<QQ")


class Record(NamedTuple):
    """One record; `end` is its end in the file."""

    first: int
    ids: list[int]
    end: int
    digest: bytes


class SavedConversation:
    """The ids in a file. `size` and `digest` are those of its last valid record, at first of its line of JSON."""

    def __init__(self, path: Path, line: bytes):
        self.path, self.size = path, len(line)
        self.digest = hashlib.blake2b(line, digest_size=DIGEST_BYTES).digest()
        self.ids: list[int] = []

    def add(self, record: Record) -> None:
        self.ids[record.first :] = record.ids
        self.size, self.digest = record.end, record.digest

    def start_digest(self, first: int, ids: list[int]) -> "hashlib.blake2b":
        """The digest of the next record up to its rows."""
        digest = hashlib.blake2b(self.digest, digest_size=DIGEST_BYTES)
        digest.update(BOUNDS.pack(first, len(ids)) + struct.pack(f"<{len(ids)}I", *ids))
        return digest


class KvFileStore:
    """The saved conversations of one model: those of the same weights, computed in the same way.

    cache: the user's cache folder, which need not exist; say: gets notices for stderr.
    """

    def __init__(self, loaded: LoadedModel, cache: Path, say: Callable[[str], object]):
        config = loaded.config
        self.config, self.context, self.say = config, loaded.context, say
        self.num_index = sum(map(config.has_own_indexer, range(config.num_layers))) if loaded.dense.has_indexer else 0
        self.row_bytes = position_bytes(config, config.num_layers, self.num_index)
        shapes, self.weights = identify_weights(loaded)
        self.folder = cache / "conversations" / shapes
        self.header = {
            "kv": VERSION,
            "weights": self.weights,
            "precision": {
                "kv": str(KV_DTYPES[config.kv_dtype]).removeprefix("torch."),
                "exact": loaded.model.experts.exact,
                "lossy": list(loaded.lossy),
                "kernels": "reference" if "plain torch" in loaded.kernels else "native",  # all of which are the same
            },
            "layers": [config.num_layers, *config.kv_widths, self.num_index, config.index_head_dim],
            "vocab_size": config.vocab_size,
        }
        self.known: dict[str, SavedConversation | None] = {}  # by name, of files that were read or written here

    def path(self, name: str, weights: str | None = None) -> Path:
        """The file of a conversation; weights "*": a pattern for those of any weights."""
        digest = short_digest(name.encode("utf-8", "surrogatepass"))
        return self.folder / f"{digest}-{weights or self.weights}.kv"

    # --- reading ---

    def ids(self, name: str) -> list[int]:
        """The ids of a conversation; [] where no file can be used, with a notice where there is one."""
        if name not in self.known:
            try:
                self.known[name] = self.read_ids(name)
            except Refused as error:
                self.say(f"[KV] conversation {shorten(name)} starts empty: {error}")
                self.known[name] = None
        known = self.known[name]
        return known.ids if known else []

    def read_ids(self, name: str) -> SavedConversation | None:
        """None where there is no file. Refused, with the reason, for one that cannot be used."""
        path = self.path(name)
        if not path.exists():
            if any(self.folder.glob(self.path(name, "*").name)):
                raise Refused("it was saved with other weights of these shapes")
            return None
        with open_kv_file(path) as file:
            line = file.readline(MAX_LINE_BYTES)
            self.check_header(path, name, line)
            saved, size = SavedConversation(path, line), os.fstat(file.fileno()).st_size
            while record := self.next_record(file, saved, size):
                saved.add(record)
        if not saved.ids:
            raise Refused(f"{path.name} is cut off or damaged")
        if size > saved.size:
            self.say(f"[KV] conversation {shorten(name)}: its last turn is cut off or damaged, and dropped")
        if len(saved.ids) > self.context:
            raise Refused(f"it has {len(saved.ids)} positions, CTX is {self.context}")
        return saved

    def check_header(self, path: Path, name: str, line: bytes) -> None:
        """Refused unless the first line of a file is what this run would write."""
        if not line.endswith(b"\n"):
            raise Refused(f"{path.name} is cut off or damaged")
        found = parse_json_object(line, f"{path.name}:")
        expected = self.header | {"name": name}
        for key in expected.keys() | found.keys():
            theirs, ours = json.dumps(found.get(key)), json.dumps(expected.get(key))
            if theirs != ours:
                raise Refused(f"it was saved with {key} {shorten(theirs)}, this run has {shorten(ours)}")

    def next_record(self, file: BinaryIO, saved: SavedConversation, size: int) -> Record | None:
        """The record after those of `saved`, its rows unread; None where no complete one follows."""
        file.seek(saved.size)
        bounds = file.read(BOUNDS.size)
        if len(bounds) < BOUNDS.size:
            return None
        first, count = BOUNDS.unpack(bounds)
        end = saved.size + BOUNDS.size + count * (4 + self.row_bytes) + DIGEST_BYTES
        if not count or first > len(saved.ids) or end > size:
            return None
        ids = list(struct.unpack(f"<{count}I", file.read(4 * count)))
        file.seek(end - DIGEST_BYTES)
        digest = file.read(DIGEST_BYTES)
        return Record(first, ids, end, digest) if max(ids) < self.config.vocab_size else None

    def load(self, name: str, kv: KvCache) -> list[int]:
        """Fill a KV cache with the conversation that `ids` found -> the ids that it holds now; fewer where a record is
        damaged."""
        kv.trim(0)
        known, saved = self.known[name], None
        assert known
        try:
            with open_kv_file(known.path) as file:
                saved = SavedConversation(known.path, file.readline(MAX_LINE_BYTES))
                while saved.size < known.size:
                    record = self.next_record(file, saved, known.size)
                    if not record or record.first + len(record.ids) > kv.capacity:
                        break
                    if self.read_rows(file, saved, record, kv) != record.digest:
                        del saved.ids[record.first :]  # their rows are overwritten
                        self.say(f"[KV] conversation {shorten(name)}: a turn is damaged; it and later ones are dropped")
                        break
                    saved.add(record)
        except (Refused, OSError) as error:
            self.say(f"[KV] conversation {shorten(name)} cannot be read ({error})")
        self.known[name] = saved if saved and saved.ids else None
        ids = saved.ids if saved else []
        if not all(all_finite(kv.floats(at, rows)) for at, rows in self.stored_rows(kv, 0, len(ids))):
            self.say(f"[KV] conversation {shorten(name)} starts empty: numbers in it are not finite")
            self.known[name], ids = None, []
        kv.advance(len(ids))
        if ids:
            self.say(f"[KV] conversation {shorten(name)}: resumed with {len(ids)} tokens")
        return list(ids)

    def read_rows(self, file: BinaryIO, saved: SavedConversation, record: Record, kv: KvCache) -> bytes | None:
        """Read the rows of a record to their places in a KV cache -> the digest that the record should have."""
        digest = saved.start_digest(record.first, record.ids)
        file.seek(saved.size + BOUNDS.size + 4 * len(record.ids))
        for _, rows in self.stored_rows(kv, record.first, record.first + len(record.ids)):
            view = as_bytes(rows)
            if file.readinto(view) < len(view):  # type: ignore[attr-defined]  # of every file opened to read bytes
                return None
            digest.update(view)
        return digest.digest()

    def stored_rows(self, kv: KvCache, first: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """The part that a file keeps of positions first .. end: (index in kv.tensors, view [end - first, width])."""
        if first == end:
            return
        layers = self.config.num_layers, self.config.num_layers, self.num_index  # without the MTP layer
        for at, (tensor, num_layers) in enumerate(zip(kv.tensors, layers, strict=False)):  # GQA has no index keys
            yield from ((at, tensor[layer, first:end]) for layer in range(num_layers))

    # --- writing ---

    def save(self, name: str, ids: list[int], kv: KvCache) -> None:
        """Save the first len(ids) positions of a KV cache, which are these ids; a notice where that fails."""
        if not ids:
            return
        known = self.known.get(name)
        try:
            if known and self.may_append(known, ids):
                first = shared_prefix_length(known.ids, ids)
                if first < len(ids):
                    with open(known.path, "r+b") as file:
                        file.seek(known.size)
                        self.write_record(file, known, first, ids, kv)
                        file.truncate()
            else:
                self.known[name] = self.write_whole(name, ids, kv)
        except OSError as error:
            self.known.pop(name, None)
            self.say(f"[KV] conversation {shorten(name)} cannot be saved ({error.strerror})")

    def may_append(self, known: SavedConversation, ids: list[int]) -> bool:
        """True if the file is as this run left it, and would not be mostly replaced records."""
        try:
            found = os.stat(known.path)
        except OSError:
            return False
        dead = known.size - len(known.ids) * self.row_bytes
        lost = (len(known.ids) - shared_prefix_length(known.ids, ids)) * self.row_bytes
        return stat.S_ISREG(found.st_mode) and found.st_size == known.size and dead + lost <= found.st_size // 2

    def write_whole(self, name: str, ids: list[int], kv: KvCache) -> SavedConversation:
        """Replace the file with a new one of one record, atomically."""
        path, line = self.path(name), json.dumps(self.header | {"name": name}).encode() + b"\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        saved = SavedConversation(path, line)
        with atomic_write(path, sync=True) as file:
            file.write(line)
            self.write_record(file, saved, 0, ids, kv)
        return saved

    def write_record(self, file: BinaryIO, saved: SavedConversation, first: int, ids: list[int], kv: KvCache) -> None:
        """Append a record of the positions from `first` on."""
        new = ids[first:]
        digest = saved.start_digest(first, new)
        file.write(BOUNDS.pack(first, len(new)) + struct.pack(f"<{len(new)}I", *new))
        for _, rows in self.stored_rows(kv, first, len(ids)):
            view = as_bytes(rows)
            digest.update(view)
            file.write(view)
        file.write(digest.digest())
        saved.add(Record(first, new, file.tell(), digest.digest()))


def as_bytes(rows: Tensor) -> memoryview:
    return memoryview(rows.view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]  # an array is a buffer


def open_kv_file(path: Path) -> BinaryIO:
    """Refused for what is no regular file or cannot be opened."""
    try:
        return open(open_file(path), "rb")
    except OSError as error:
        raise Refused(f"{path.name} cannot be read ({error.strerror})") from None


def short_digest(*parts: bytes) -> str:
    """16 hex digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def identify_weights(loaded: LoadedModel) -> tuple[str, str]:
    """-> (what all models of these shapes have in common, what changes with the weights), 16 hex digits each.

    The second includes the times at which the files were written: a file copied anew is refused rather than other
    weights taken for the same.
    """
    sizes = file_sizes(loaded.dense)
    shapes = short_digest(loaded.dense.index.config_bytes(), json.dumps(sorted(sizes.items())).encode())
    paths = {entry.path for entry in loaded.dense.index.entries.values()}
    times = sorted((path.name, path.stat().st_mtime_ns) for path in paths)
    return shapes, short_digest(identify(loaded).encode(), json.dumps(times).encode())
