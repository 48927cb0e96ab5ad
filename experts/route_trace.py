"""Route traces: which experts each layer of a run asked for, written as it goes, to be replayed without the model.

A trace is a file of JSON lines. The first says whose it is:

    {"route_trace": 1, "model_type": "glm_moe_dsa", "layers": [3, 4, ...], "num_experts": 256, "top_k": 8,
     "slot_bytes": 20054016}

`layers` are the ids of the sparse layers in the order in which they run, `slot_bytes` is what one expert takes in
memory (of the largest layer). Then there is a line for each layer of each chunk of rows, in the order of the run:

    [3, 1, [7, 90, 201]]                        layer, rows, experts chosen: a token of decode, each by one row
    [3, 512, [0, 1, 5], [37, 2, 160]]           the same with the number of rows that chose each

A run appends to a trace of the same model. Every line is written at once; a last one without its end, from a process
that was killed, is dropped by readers and writers.
"""

import errno
import json
import os

from errors import Refused, show

VERSION = 1


class RouteTrace:
    """Writes a trace. One thread uses it."""

    def __init__(self, path, model_type, layers, num_experts, top_k, slot_bytes):
        """Begin the file, or go on with one of the same model. Refused when it cannot be written or is another's."""
        header = dict(
            route_trace=VERSION,
            model_type=model_type,
            layers=list(layers),
            num_experts=num_experts,
            top_k=top_k,
            slot_bytes=slot_bytes,
        )
        self.path = path
        try:
            self.file = open(path, "a+b", buffering=0)  # noqa: SIM115, open as long as the run
            try:
                self.begin(json.dumps(header).encode() + b"\n")
            except BaseException:
                self.file.close()
                raise
        except OSError as error:
            raise Refused(f"{path}: cannot be written as a route trace ({error.strerror or error})") from None

    def begin(self, header):
        self.file.seek(0)
        first = self.file.readline(len(header) + 1)
        if not first:
            self.write(header)
        elif first != header:
            raise Refused(f"{self.path}: is no route trace of this model; name another file, or delete it")
        else:
            self.file.truncate(end_of_last_line(self.file))

    def record(self, layer, uses, chunk_rows, rows=None):
        """As of RouteObserver; `rows` are not written."""
        experts = sorted(uses)
        line = [layer, chunk_rows, experts]
        if chunk_rows > 1:
            line.append([uses[expert] for expert in experts])
        try:
            self.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        except OSError as error:
            raise Refused(f"{self.path}: the route trace cannot be written ({error.strerror})") from None

    def write(self, line):
        if self.file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self):
        self.file.close()


def end_of_last_line(file):
    """Bytes of the file up to its last newline; at most one line, which is short beside 1 MB, is looked through."""
    size = file.seek(0, os.SEEK_END)
    start = max(0, size - (1 << 20))
    file.seek(start)
    return start + file.read().rfind(b"\n") + 1


def read_trace(path):
    """-> (header, [(layer, rows, {expert: rows}), ...]). Refused, naming the line, for what is no trace."""
    try:
        with open(path, "rb") as file:
            lines = file.read().split(b"\n")[:-1]
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}; name a route trace") from None
    if not lines:
        raise Refused(f"{path}: is empty, it is no route trace")
    header = check_header(path, parse(path, 1, lines[0]))
    layers = set(header["layers"])
    return header, [
        check_event(path, number, parse(path, number, line), layers, header["num_experts"])
        for number, line in enumerate(lines[1:], 2)
    ]


def parse(path, number, line):
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise Refused(f"{path}: line {number} is no JSON; this is no route trace, or it is damaged") from None


def check_header(path, header):
    if not isinstance(header, dict) or header.get("route_trace") != VERSION:
        raise Refused(f"{path}: does not begin as a route trace of version {VERSION}")
    layers, counts = header.get("layers"), [header.get(name) for name in ("num_experts", "top_k", "slot_bytes")]
    if not (is_list_of_counts(layers) and layers and len(set(layers)) == len(layers)):
        raise Refused(f"{path}: its layers are {show(layers)}, expected a list of different ids")
    if not (is_list_of_counts(counts) and 0 < counts[1] <= counts[0] <= 1 << 16):
        raise Refused(f"{path}: num_experts, top_k and slot_bytes are {show(counts)}, which no model has")
    return header


def check_event(path, number, event, layers, num_experts):
    """A parsed line -> (layer, rows, {expert: rows})."""
    try:
        layer, rows, experts = event[:3]
        counts = event[3] if rows > 1 else [1] * len(experts)
        uses = dict(zip(experts, counts, strict=True))
        good = len(event) == (4 if rows > 1 else 3) and layer in layers and len(uses) == len(experts)
        good = good and is_list_of_counts([layer, rows, *experts, *counts])
        good = good and rows > 0 and max(uses, default=0) < num_experts and all(0 < n <= rows for n in counts)
    except (TypeError, ValueError, IndexError, KeyError):
        good = False
    if not good:
        raise Refused(f"{path}: line {number} is {show(event)}, expected [layer, rows, experts, rows of each]")
    return layer, rows, uses


def is_list_of_counts(values):
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
