"""Which experts a model uses, learned over its runs: kept in the user's cache folder, so that a run begins with it.

A history is what all runs used, forgotten with a half-life of 8,192 tokens. A run begins with a little of it, as if 16
tokens had used it: on another topic that does no harm, where the whole of it costs 7 points of the hit rate (measured
on models/tiny over 100 tokens), and on the same topic it already serves. What is kept is written to usage/<identity of
the model>.json in the cache folder:

    {"usage": 1, "layers": [3, 4, ...], "num_experts": 256, "tokens": 81234, "counts": {"3": [[7, 12.5], ...], ...}}

`layers` are the ids of the sparse layers, `tokens` how many all runs together had, and `counts` has for each layer
[expert, aged uses], where an expert that every token uses has at most 8,192 / ln 2 of them. What another program made
of that file is checked as hostile input: a file with anything wrong in it counts as no history.

The C engine keeps a history in the snapshot folder, `.coli_usage`: a line `layer expert uses` for each expert, its
MTP layer included, with the uses of all runs and nothing ever forgotten. It is read while there is no file of ours.
"""

import hashlib
import json
import math
import re
from collections import Counter

from errors import Refused, shorten, show
from experts.policy import STEADY
from experts.route_trace import is_list_of_counts
from machine.files import save_text
from snapshot.config import parse_json_object
from snapshot.reader import open_file, read_file

VERSION = 1
ROUTER_BYTES = 1 << 16  # enough of a router to tell two trainings of one architecture apart
MAX_FILE_BYTES = 4_000_000  # the largest model that is opened writes 2.2 MB
MAX_C_ENGINE_BYTES = 16_000_000
HALF_LIFE = 8192  # tokens
PRIMED_TOKENS = 16  # what a run begins with is worth that many tokens
LONG_RUN_USES = HALF_LIFE / math.log(2)  # what the count of an expert comes to that every token uses
MOST_USES = 2 * LONG_RUN_USES  # no count is near this
LEAST_USES = 0.001  # that are kept
MOST_TOKENS = 1 << 53  # so that the number stays printable
C_ENGINE_FILE = ".coli_usage"
C_ENGINE_LINE = re.compile(rb"^(\d{1,9}) (\d{1,9}) (\d{1,19})\r?\n", re.MULTILINE)


class UsageHistory:
    """The history of one model. Nothing that is wrong with its file is an error; at worst nothing is known."""

    def __init__(self, opened, cache):
        """`opened` is an open snapshot; `cache` the user's cache folder, which need not exist. Refused when the
        snapshot cannot be read."""
        self.config, self.c_engine_path = opened.config, opened.folder / C_ENGINE_FILE
        self.path = cache / "usage" / f"{identify(opened)}.json"
        self.tokens, self.history, self.primed = 0, {}, {}  # of the runs before this one; of it what this one had

    def load(self):
        """-> ({(layer, expert): uses} for ExpertPolicy.prime, a line for stderr on where they are from or why they are
        not taken, None where there is no history)."""
        try:
            self.tokens, self.history, notice = self.read()
        except Refused as error:
            self.history, notice = {}, f"[usage] {error}; begins without a history"
        self.primed = scale(self.history, self.config.num_active_experts * PRIMED_TOKENS)
        return self.primed, notice

    def read(self):
        """-> (tokens, {(layer, expert): uses}, line)."""
        layers, num_experts = self.config.sparse_layers, self.config.num_experts
        data = read_start(self.path, MAX_FILE_BYTES + 1)
        if data is not None:
            tokens, counts = parse(self.path, data, layers, num_experts)
            return tokens, counts, f"[usage] begins with what {tokens} tokens of earlier runs used"
        data = read_start(self.c_engine_path, MAX_C_ENGINE_BYTES)
        counts = parse_c_engine(data or b"", layers, num_experts)
        counts = scale(counts, self.config.num_active_experts * LONG_RUN_USES, LONG_RUN_USES)
        return 0, counts, f"[usage] begins with {C_ENGINE_FILE}, the C engine's history" if counts else None

    def save(self, counts, tokens):
        """Add `counts`, those of ExpertPolicy after a run of so many tokens that began with `load`.

        The file is written whole or not at all, and where it cannot be written nothing is kept. Of two processes the
        last one wins. Without any counts, as from a policy that learns nothing, the file stays as it is.
        """
        if not counts:
            return
        kept, forgotten = 2.0 ** (-tokens / HALF_LIFE), 2.0 ** (-tokens / STEADY)
        by_layer = {str(layer): [] for layer in self.config.sparse_layers}
        for key in sorted(counts.keys() | self.history.keys()):
            if str(key[0]) not in by_layer:
                continue  # the MTP layer, which not every run has
            own = max(0.0, counts.get(key, 0.0) - forgotten * self.primed.get(key, 0.0))
            uses = min(kept * self.history.get(key, 0.0) + own, MOST_USES)
            if uses >= LEAST_USES:
                by_layer[str(key[0])].append([key[1], round(uses, 3)])
        history = header(self.config.sparse_layers, self.config.num_experts)
        history |= {"tokens": self.tokens + tokens, "counts": by_layer}
        save_text(self.path, json.dumps(history, separators=(",", ":")))


def identify(opened):
    """What makes it this model, wherever it lies, as 16 hex digits: config.json, names and sizes of the files with
    tensors, and the beginning of its first router. Fine-tunes of one model differ in the last alone."""
    dense, sizes = opened.dense, file_sizes(opened.dense)
    parts = [read_file(opened.folder / "config.json"), json.dumps(sorted(sizes.items())).encode()]
    for layer in opened.config.sparse_layers[:1]:
        name, _ = dense.layer_tables(layer)["router"]["router"]
        entry = dense.stored[name]
        parts.append(bytearray(min(entry.num_bytes, ROUTER_BYTES)))
        opened.reader.read_into(entry.path, entry.offset, memoryview(parts[-1]), f"tensor {name}")
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def file_sizes(dense):
    """{name of a file with tensors: where the last of them ends}."""
    sizes = {}
    for entry in dense.index.entries.values():
        name = entry.path.name
        sizes[name] = max(sizes.get(name, 0), entry.offset + entry.num_bytes)
    return sizes


def header(layers, num_experts):
    """What a history says of its model."""
    return {"usage": VERSION, "layers": list(layers), "num_experts": num_experts}


def read_start(path, num_bytes):
    """At most so many bytes from the start of a file; None where there is none that can be read. Refused for a pipe, a
    folder or a link to nothing."""
    try:
        with open(open_file(path), "rb") as file:
            return file.read(num_bytes)
    except OSError:
        return None


def parse(path, data, layers, num_experts):
    """The bytes of a history -> (tokens, {(layer, expert): uses}). Refused, naming what is wrong first."""
    if len(data) > MAX_FILE_BYTES:
        raise Refused(f"{path}: is larger than any history")
    raw = parse_json_object(data, f"{path}:")
    expected = header(layers, num_experts)
    is_ours = is_list_of_counts(raw.get("layers")) and all(raw.get(name) == expected[name] for name in expected)
    # 1.0 and true equal 1 too, but are not what we write.
    is_ours = is_ours and is_list_of_counts([raw.get(name) for name in ("usage", "num_experts", "tokens")])
    if not is_ours or raw["tokens"] > MOST_TOKENS or not isinstance(raw.get("counts"), dict):
        raise Refused(f"{path}: is no history of this model")
    names, counts = {str(layer): layer for layer in layers}, {}
    for name, pairs in raw["counts"].items():
        if name not in names:
            raise Refused(f"{path}: has counts of layer {shorten(name)}, which is no sparse layer of this model")
        for pair in pairs if isinstance(pairs, list) else [pairs]:
            if not is_count(pair, num_experts) or (names[name], pair[0]) in counts:
                raise Refused(f"{path}: layer {name} has {show(pair)}, expected [expert, uses] once for each expert")
            counts[names[name], pair[0]] = pair[1]
    return raw["tokens"], counts


def is_count(pair, num_experts):
    """Whether a value of the file is [expert, uses]; true and NaN are no numbers."""
    if not isinstance(pair, list) or len(pair) != 2:
        return False
    expert, uses = pair
    return type(expert) is int and 0 <= expert < num_experts and type(uses) in (int, float) and 0 <= uses <= MOST_USES


def parse_c_engine(data, layers, num_experts):
    """The bytes of a .coli_usage -> {(layer, expert): uses}; equal keys are added, as the C engine does. Other layers
    and whatever is no such line are skipped, and a last line without its end."""
    counts, layers = {}, set(layers)
    for match in C_ENGINE_LINE.finditer(data):
        layer, expert, uses = map(int, match.groups())
        if layer in layers and expert < num_experts and uses:
            counts[layer, expert] = counts.get((layer, expert), 0) + uses
    return counts


def scale(counts, most, most_each=math.inf):
    """{(layer, expert): uses} -> the same, made smaller where a layer sums to more than `most`, and at most `most_each`
    for one expert."""
    sums = Counter()
    for (layer, _), uses in counts.items():
        sums[layer] += uses
    return {key: min(uses * min(1.0, most / sums[key[0]]), most_each) for key, uses in counts.items() if uses}
