"""Conversations that survive a restart: what a KV cache holds, in a file for each name.

    conversations/<16 hex digits of config.json, names and sizes of the files>/<of the name>-<of the weights>.kv

in the user's cache folder. A file is a line of JSON, which binds the model, its weights, how it computes and the shapes
of a position, and after it a record for each turn:

    first, count   two little-endian 64-bit numbers: the record holds positions first .. first + count, in place of
                   whatever earlier records said of `first` and later ones
    ids            count 32-bit numbers
    rows           float32: for each layer the latents [count, width], then all rotated keys, then all index keys;
                   with GQA for each layer the keys, then all values
    digest         BLAKE2b, 32 bytes, of the digest before (of the first record: of the line) and of all the above

A turn appends a record, so a crash loses that turn at most: a record that is not whole, or whose digest is another one,
ends the file. The slots of the multi-token-prediction layer are not kept, it begins anew. What does not match is
refused with the reason and overwritten by the next turn; every size is checked before anything is read.
"""

import hashlib
import json
import os
import stat
import struct

from errors import Refused, shorten
from experts.usage import file_sizes, identify
from kernels.dispatch import all_finite
from machine.files import atomic_write
from snapshot.reader import open_file, parse_json_object, read_file
from text.prompt import shared_prefix_length

VERSION = 1
DIGEST_BYTES = 32
MAX_LINE_BYTES = 1 << 16
BOUNDS = struct.Struct("<QQ")


class SavedConversation:
    """What a file holds: ids, and where their records lie. `size` and `digest` are those of its last whole record."""

    def __init__(self, path, size, digest):
        self.path, self.size, self.digest, self.ids = path, size, digest, []

    def add(self, first, ids, size, digest):
        """One more record."""
        self.ids[first:] = ids
        self.size, self.digest = size, digest


class KvFileStore:
    """The conversations of one model. Only what was saved by the same weights, computed in the same way, is taken.

    loaded: of load/model.py; cache: the user's cache folder, which need not exist; say: gets lines for stderr.
    """

    def __init__(self, loaded, cache, say):
        config = loaded.config
        self.config, self.context, self.say = config, loaded.context, say
        self.num_index = sum(map(config.has_own_indexer, range(config.num_layers))) if loaded.dense.has_indexer else 0
        self.row_bytes = 4 * (config.num_layers * sum(config.kv_widths) + self.num_index * config.index_head_dim)
        shapes, weights = identify_weights(loaded)
        self.folder, self.weights = cache / "conversations" / shapes, weights
        self.header = {
            "kv": VERSION,
            "weights": weights,
            "precision": {
                "kv": "float32",
                "exact": loaded.model.experts.exact,
                "lossy": list(loaded.lossy),
                "kernels": "reference" if "plain torch" in loaded.kernels else "native",  # all of which are the same
            },
            "layers": [config.num_layers, *config.kv_widths, self.num_index, config.index_head_dim],
            "vocab_size": config.vocab_size,
        }
        self.known = {}  # name -> SavedText, of files that were read or written here

    def path(self, name, weights=None):
        """The file of a conversation; weights "*": a pattern for those of any weights."""
        digest = digest_of(name.encode("utf-8", "surrogatepass"))
        return self.folder / f"{digest}-{weights or self.weights}.kv"

    def ids(self, name):
        """The ids of a conversation, [] without any that may be taken: then it was said why, if there is a file."""
        if name not in self.known:
            try:
                self.known[name] = self.open(name)
            except Refused as error:
                self.say(f"[KV] conversation {shorten(name)} begins anew: {error}")
                self.known[name] = None
        return self.known[name].ids if self.known[name] else []

    def open(self, name):
        """-> SavedText, None where there is no file. Refused, with the reason, for one that may not be taken."""
        path = self.path(name)
        if not path.exists():
            if any(self.folder.glob(self.path(name, "*").name)):
                raise Refused("it was saved with other weights of these shapes")
            return None
        with reading(path) as file:
            line = file.readline(MAX_LINE_BYTES)
            self.check_header(path, name, line)
            saved = SavedConversation(path, len(line), hashlib.blake2b(line, digest_size=DIGEST_BYTES).digest())
            size = os.fstat(file.fileno()).st_size
            while record := self.next_record(file, saved, size):
                saved.add(*record)
        if not saved.ids:
            raise Refused(f"{path.name} is cut off or damaged")
        if size > saved.size:
            self.say(f"[KV] conversation {shorten(name)}: its last turn is cut off or damaged, and forgotten")
        if len(saved.ids) > self.context:
            raise Refused(f"it has {len(saved.ids)} positions, CTX is {self.context}")
        return saved

    def check_header(self, path, name, line):
        """Refused unless the first line of a file is what we would write."""
        if not line.endswith(b"\n"):
            raise Refused(f"{path.name} is cut off or damaged")
        found = parse_json_object(line, f"{path.name}:")
        expected = self.header | {"name": name}
        for key in expected.keys() | found.keys():
            if json.dumps(found.get(key)) != json.dumps(expected.get(key)):
                raise Refused(
                    f"it was saved with {key} {shorten(json.dumps(found.get(key)))}, "
                    f"this run has {shorten(json.dumps(expected.get(key)))}"
                )

    def next_record(self, file, saved, size):
        """The record after those of `saved` -> arguments of SavedText.add, None where no whole one follows. Its rows
        are not looked at yet."""
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
        return (first, ids, end, digest) if max(ids) < self.config.vocab_size else None

    def load(self, name, kv):
        """Fill a KvCache with what `ids` gave -> the ids that it holds now; fewer where a record turns out to be
        damaged."""
        kv.trim(0)
        known, out = self.known[name], None
        try:
            with reading(known.path) as file:
                line = file.readline(MAX_LINE_BYTES)
                out = SavedConversation(known.path, len(line), hashlib.blake2b(line, digest_size=DIGEST_BYTES).digest())
                while out.size < known.size:
                    record = self.next_record(file, out, known.size)
                    if not record or record[0] + len(record[1]) > kv.capacity:
                        break
                    if self.read_rows(file, out, record, kv) != record[3]:
                        del out.ids[record[0] :]  # it stood in their place
                        self.say(
                            f"[KV] conversation {shorten(name)}: a turn is damaged; it and what follows is forgotten"
                        )
                        break
                    out.add(*record)
        except (Refused, OSError) as error:
            self.say(f"[KV] conversation {shorten(name)} cannot be read ({error})")
        self.known[name] = out if out and out.ids else None
        ids = out.ids if out else []
        if not all(all_finite(part) for part in self.parts(kv, 0, len(ids))):
            self.say(f"[KV] conversation {shorten(name)} begins anew: numbers in it are not finite")
            self.known[name], ids = None, []
        kv.advance(len(ids))
        if ids:
            self.say(f"[KV] conversation {shorten(name)}: resumed with {len(ids)} tokens")
        return list(ids)

    def read_rows(self, file, saved, record, kv):
        """Read the rows of a record to their places in a KvCache -> the digest that the record should have."""
        first, ids = record[:2]
        digest = start_digest(saved.digest, first, ids)
        file.seek(saved.size + BOUNDS.size + 4 * len(ids))
        for part in self.parts(kv, first, first + len(ids)):
            view = memoryview(part.numpy()).cast("B")
            if file.readinto(view) < len(view):
                return None
            digest.update(view)
        return digest.digest()

    def parts(self, kv, first, end):
        """What is kept of positions first .. end, as views [end - first, width], each contiguous."""
        if first == end:
            return
        layers = self.config.num_layers, self.config.num_layers, self.num_index  # without the MTP layer
        for tensor, num_layers in zip(kv.tensors, layers, strict=False):  # GQA has no index keys
            yield from (tensor[layer, first:end] for layer in range(num_layers))

    def save(self, name, ids, kv):
        """Keep the first len(ids) positions of a KvCache, which are these ids. What cannot be written is said."""
        if not ids:
            return
        known = self.known.get(name)
        try:
            if known and self.may_append(known, ids):
                common = shared_prefix_length(known.ids, ids)
                if common < len(ids):
                    with open(known.path, "r+b") as file:
                        file.seek(known.size)
                        known.add(*self.write_record(file, known, common, ids, kv))
                        file.truncate()
            else:
                self.known[name] = self.write_whole(name, ids, kv)
        except OSError as error:
            self.known.pop(name, None)
            self.say(f"[KV] conversation {shorten(name)} cannot be saved ({error.strerror})")

    def may_append(self, known, ids):
        """Whether the file is as we left it, and would not be mostly what holds no longer."""
        try:
            found = os.stat(known.path)
        except OSError:
            return False
        dead = known.size - len(known.ids) * self.row_bytes
        lost = (len(known.ids) - shared_prefix_length(known.ids, ids)) * self.row_bytes
        return stat.S_ISREG(found.st_mode) and found.st_size == known.size and dead + lost <= found.st_size // 2

    def write_whole(self, name, ids, kv):
        """A new file in place of what there was, whole or not at all -> SavedText."""
        path, line = self.path(name), json.dumps(self.header | {"name": name}).encode() + b"\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        saved = SavedConversation(path, len(line), hashlib.blake2b(line, digest_size=DIGEST_BYTES).digest())
        with atomic_write(path, sync=True) as file:
            file.write(line)
            saved.add(*self.write_record(file, saved, 0, ids, kv))
        return saved

    def write_record(self, file, saved, first, ids, kv):
        """Append positions from `first` on -> arguments of SavedText.add."""
        new = ids[first:]
        digest = start_digest(saved.digest, first, new)
        file.write(BOUNDS.pack(first, len(new)) + struct.pack(f"<{len(new)}I", *new))
        for part in self.parts(kv, first, len(ids)):
            view = memoryview(part.numpy()).cast("B")
            digest.update(view)
            file.write(view)
        file.write(digest.digest())
        return first, new, file.tell(), digest.digest()


def start_digest(before, first, ids):
    """The digest of a record up to its rows."""
    digest = hashlib.blake2b(before, digest_size=DIGEST_BYTES)
    digest.update(BOUNDS.pack(first, len(ids)) + struct.pack(f"<{len(ids)}I", *ids))
    return digest


def reading(path):
    """A file, opened to read bytes. Refused for what is no plain file or cannot be opened."""
    try:
        return open(open_file(path), "rb")
    except OSError as error:
        raise Refused(f"{path.name} cannot be read ({error.strerror})") from None


def digest_of(*parts):
    """16 hex digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def identify_weights(opened):
    """-> (what all models of these shapes have in common, what changes with the weights), 16 hex digits each.

    The second has the times at which the files were written: a file copied anew is refused rather than other weights
    taken for the same.
    """
    sizes = file_sizes(opened.dense)
    shapes = digest_of(read_file(opened.folder / "config.json"), json.dumps(sorted(sizes.items())).encode())
    paths = {entry.path for entry in opened.dense.index.entries.values()}
    times = sorted((path.name, path.stat().st_mtime_ns) for path in paths)
    return shapes, digest_of(identify(opened).encode(), json.dumps(times).encode())
