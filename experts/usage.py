"""UsageHistory: which experts a model uses, learned over its runs and kept in the user's cache folder.

The history decays with a half-life of 8,192 tokens. A run starts with little of it, as if 16 tokens had used it: on
another topic that does no harm, where all of it costs 7 points of the hit rate (measured on models/tiny over 100
tokens), and on the same topic it already helps. It is kept in usage/<identity of the model>.json of the cache folder:

    {"usage": 1, "layers": [3, 4, ...], "num_experts": 256, "tokens": 81234, "counts": {"3": [[7, 12.5], ...], ...}}

`layers` are the ids of the sparse layers, `tokens` the tokens of all runs, and `counts` has for each layer [expert,
decayed uses], where an expert that every token uses has at most 8,192 / ln 2 of them. The file is checked as hostile
input: with anything wrong in it, it counts as no history.

The C engine keeps a history in the snapshot folder, `.coli_usage`: a line `layer expert uses` for each expert, its
MTP layer included, with the uses of all runs, not decayed. It is read while there is no file of ours.
"""

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from errors import Refused, shorten, show
from experts.policy import REMEMBERED, ExpertKey
from experts.route_trace import is_list_of_counts
from machine.files import save_text
from snapshot.dense import DenseTensors
from snapshot.reader import open_file, parse_json_object

VERSION = 1
ROUTER_BYTES = 1 << 16  # enough of a router to tell two trainings of one architecture apart
MAX_FILE_BYTES = 4_000_000  # the largest model that is opened writes 2.2 MB
MAX_C_ENGINE_BYTES = 16_000_000
HALF_LIFE = 8192  # tokens
PRIMED_TOKENS = 16  # a run starts with the uses of this many tokens
LONG_RUN_USES = HALF_LIFE / math.log(2)  # limit of the count of an expert that every token uses
MAX_USES = 2 * LONG_RUN_USES  # no count is near this
MIN_USES = 0.001  # that are kept
MAX_TOKENS = 1 << 53  # so that the number stays printable
C_ENGINE_FILE = ".coli_usage"
C_ENGINE_LINE = re.compile(rb"^(\d{1,9}) (\d{1,9}) (\d{1,19})\r?\n", re.MULTILINE)

Counts = dict[ExpertKey, float]  # {(layer, expert): decayed uses}


class UsageHistory:
    """The history of one model. A damaged or unreadable file is no error: the history is then empty."""

    def __init__(self, opened: Any, cache: Path) -> None:
        """opened: an OpenedSnapshot (of load/); cache: the user's cache folder, which need not exist. Refused when
        the snapshot cannot be read."""
        self.config = opened.config
        self.c_engine_path = opened.dense.index.folder / C_ENGINE_FILE
        self.path = cache / "usage" / f"{identify(opened)}.json"
        self.tokens = 0  # of earlier runs
        self.history: Counts = {}
        self.primed: Counts = {}  # the part of the history that this run starts with

    def load(self) -> tuple[Counts, str | None]:
        """-> (counts for EvictionPolicy.prime, a notice on their source or why they are not used, None without any)."""
        try:
            self.tokens, self.history, notice = self.read_history()
        except Refused as error:
            self.history, notice = {}, f"[usage] {error}; starts without a history"
        self.primed = scale(self.history, self.config.num_active_experts * PRIMED_TOKENS)
        return self.primed, notice

    def read_history(self) -> tuple[int, Counts, str | None]:
        """-> (tokens, counts, notice)."""
        layers, num_experts = self.config.sparse_layers, self.config.num_experts
        data = read_start(self.path, MAX_FILE_BYTES + 1)
        if data is not None:
            tokens, counts = parse_history(self.path, data, layers, num_experts)
            return tokens, counts, f"[usage] starts with the expert usage of {tokens} tokens of earlier runs"
        data = read_start(self.c_engine_path, MAX_C_ENGINE_BYTES)
        counts = parse_c_engine(data or b"", layers, num_experts)
        counts = scale(counts, self.config.num_active_experts * LONG_RUN_USES, LONG_RUN_USES)
        return 0, counts, f"[usage] starts with {C_ENGINE_FILE}, the C engine's history" if counts else None

    def save(self, counts: Counts, tokens: int) -> None:
        """Add the use counts of EvictionPolicy after a run of `tokens` tokens that began with `load`.

        The file is written atomically; where it cannot be written nothing is kept. Of two processes the last one wins.
        """
        if not counts:
            return
        kept, forgotten = 2.0 ** (-tokens / HALF_LIFE), 2.0 ** (-tokens / REMEMBERED)
        by_layer: dict[str, list] = {str(layer): [] for layer in self.config.sparse_layers}
        for key in sorted(counts.keys() | self.history.keys()):
            if str(key[0]) not in by_layer:
                continue  # the MTP layer, which not every run has
            own = max(0.0, counts.get(key, 0.0) - forgotten * self.primed.get(key, 0.0))
            uses = min(kept * self.history.get(key, 0.0) + own, MAX_USES)
            if uses >= MIN_USES:
                by_layer[str(key[0])].append([key[1], round(uses, 3)])
        history = history_header(self.config.sparse_layers, self.config.num_experts)
        history |= {"tokens": self.tokens + tokens, "counts": by_layer}
        save_text(self.path, json.dumps(history, separators=(",", ":")))


def identify(opened: Any) -> str:
    """16 hex digits that identify a model wherever it lies: a hash of config.json, or a GGUF's metadata, of names and
    sizes of the files with tensors, and of the start of the first router, in which alone fine-tunes differ."""
    sizes = json.dumps(sorted(file_sizes(opened.dense).items()))
    parts: list[bytes | bytearray] = [opened.dense.index.config_bytes(), sizes.encode()]
    for layer in opened.config.sparse_layers[:1]:
        name, _ = opened.dense.layer_tables(layer)["router"]["router"]
        entry = opened.dense.floats[name]
        parts.append(router := bytearray(min(entry.num_bytes, ROUTER_BYTES)))
        opened.reader.read_into(entry.path, entry.offset, memoryview(router), f"tensor {name}")
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def file_sizes(dense: DenseTensors) -> dict[str, int]:
    """{name of a file with tensors: where the last of them ends}."""
    sizes: dict[str, int] = {}
    for entry in dense.index.entries.values():
        name = entry.path.name
        sizes[name] = max(sizes.get(name, 0), entry.offset + entry.num_bytes)
    return sizes


def history_header(layers: Sequence[int], num_experts: int) -> dict[str, Any]:
    return {"usage": VERSION, "layers": list(layers), "num_experts": num_experts}


def read_start(path: Path, num_bytes: int) -> bytes | None:
    """At most num_bytes from the start of a file; None if it cannot be read. Refused for a pipe, a folder or a broken
    link."""
    try:
        with open(open_file(path), "rb") as file:
            return file.read(num_bytes)
    except OSError:
        return None


def parse_history(path: Path, data: bytes, layers: Sequence[int], num_experts: int) -> tuple[int, Counts]:
    """The bytes of a history -> (tokens, counts). Refused, naming the first thing that is wrong."""
    if len(data) > MAX_FILE_BYTES:
        raise Refused(f"{path}: is larger than any history")
    raw = parse_json_object(data, f"{path}:")
    expected = history_header(layers, num_experts)
    is_ours = is_list_of_counts(raw.get("layers")) and all(raw.get(name) == expected[name] for name in expected)
    # 1.0 and true equal 1 too, but are not what we write.
    is_ours = is_ours and is_list_of_counts([raw.get(name) for name in ("usage", "num_experts", "tokens")])
    if not is_ours or raw["tokens"] > MAX_TOKENS or not isinstance(raw.get("counts"), dict):
        raise Refused(f"{path}: is no history of this model")
    names = {str(layer): layer for layer in layers}
    counts: Counts = {}
    for name, pairs in raw["counts"].items():
        if name not in names:
            raise Refused(f"{path}: has counts of layer {shorten(name)}, which is no sparse layer of this model")
        for pair in pairs if isinstance(pairs, list) else [pairs]:
            if not is_count(pair, num_experts) or (names[name], pair[0]) in counts:
                raise Refused(f"{path}: layer {name} has {show(pair)}, expected [expert, uses] once for each expert")
            counts[names[name], pair[0]] = pair[1]
    return raw["tokens"], counts


def is_count(pair: Any, num_experts: int) -> bool:
    """True if a value of the file is [expert, uses]; true and NaN are no numbers."""
    if not isinstance(pair, list) or len(pair) != 2:
        return False
    expert, uses = pair
    return type(expert) is int and 0 <= expert < num_experts and type(uses) in (int, float) and 0 <= uses <= MAX_USES


def parse_c_engine(data: bytes, layers: Sequence[int], num_experts: int) -> Counts:
    """The bytes of a .coli_usage -> counts; equal keys are added, as the C engine does. Other layers, other lines and
    an incomplete last line are skipped."""
    counts: Counts = {}
    for match in C_ENGINE_LINE.finditer(data):
        layer, expert, uses = map(int, match.groups())
        if layer in layers and expert < num_experts and uses:
            counts[layer, expert] = counts.get((layer, expert), 0) + uses
    return counts


def scale(counts: Counts, max_sum: float, max_each: float = math.inf) -> Counts:
    """Scale the counts of each layer down to a sum of at most max_sum, each to at most max_each."""
    sums: defaultdict[int, float] = defaultdict(float)
    for (layer, _), uses in counts.items():
        sums[layer] += uses
    return {key: min(uses * min(1.0, max_sum / sums[key[0]]), max_each) for key, uses in counts.items() if uses}
