"""RouteTrace: a file of the experts that each layer of a run chose, to replay without the model (dev/replay_trace.py).

It consists of JSON lines. The first one identifies the model:

    {"route_trace": 1, "model_type": "glm_moe_dsa", "layers": [3, 4, ...], "num_experts": 256, "top_k": 8,
     "slot_bytes": 20054016}

`layers` are the ids of the sparse layers in the order in which they run, `slot_bytes` is the memory of one expert (of
the largest layer). Each layer of each chunk of token rows adds a line, in the order of the run:

    [3, 1, [7, 90, 201]]                        layer, rows, experts chosen: a decoded token, each expert by one row
    [3, 512, [0, 1, 5], [37, 2, 160]]           the same with the number of rows that chose each

A run appends to a trace of the same model. Every line is written at once; an incomplete last line, of a process that
was killed, is dropped by readers and writers.
"""

import errno
import json
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from errors import Refused, show
from machine.fields import FieldReader

VERSION = 1

Event = tuple[int, int, dict[int, int]]  # (layer, rows, {expert: rows that chose it})


class RouteTrace:
    """A RouteObserver that appends to a file. One thread uses it."""

    def __init__(
        self, path: str | Path, model_type: str, layers: Iterable[int], num_experts: int, top_k: int, slot_bytes: int
    ) -> None:
        """Create the file, or append to one of the same model. Refused when it cannot be written or is another's."""
        header: dict[str, Any] = dict(route_trace=VERSION, model_type=model_type, layers=list(layers))
        header |= dict(num_experts=num_experts, top_k=top_k, slot_bytes=slot_bytes)
        self.path = path
        try:
            self.file = open(path, "a+b", buffering=0)  # noqa: SIM115, open as long as the run
            try:
                self.write_header(json.dumps(header).encode() + b"\n")
            except BaseException:
                self.file.close()
                raise
        except OSError as error:
            raise Refused(f"{path}: cannot be written as a route trace ({error.strerror or error})") from None

    def write_header(self, header: bytes) -> None:
        self.file.seek(0)
        first = self.file.readline(len(header) + 1)
        if not first:
            self.write_line(header)
        elif first != header:
            raise Refused(f"{self.path}: is no route trace of this model; name another file, or delete it")
        else:
            self.file.truncate(end_of_last_line(self.file))

    def record(self, layer: int, uses: dict[int, int], chunk_rows: int, rows: Tensor | None = None) -> None:
        """See RouteObserver; the row numbers are not written."""
        experts = sorted(uses)
        line: list[Any] = [layer, chunk_rows, experts]
        if chunk_rows > 1:
            line.append([uses[expert] for expert in experts])
        try:
            self.write_line(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        except OSError as error:
            raise Refused(f"{self.path}: the route trace cannot be written ({error.strerror})") from None

    def write_line(self, line: bytes) -> None:
        if self.file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self.file.close()


def end_of_last_line(file: BinaryIO) -> int:
    """Offset behind the last newline, which is within the last MB: a line is shorter than that."""
    size = file.seek(0, os.SEEK_END)
    start = max(0, size - (1 << 20))
    file.seek(start)
    return start + file.read().rfind(b"\n") + 1


def read_trace(path: Path) -> tuple[dict[str, Any], list[Event]]:
    """-> (header, events). Refused, naming the line, for what is no trace."""
    try:
        with open(path, "rb") as file:
            lines = file.read().split(b"\n")[:-1]
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}; name a route trace") from None
    if not lines:
        raise Refused(f"{path}: is empty, it is no route trace")
    header = check_header(path, parse_line(path, 1, lines[0]))
    layers = set(header["layers"])
    return header, [
        check_event(path, number, parse_line(path, number, line), layers, header["num_experts"])
        for number, line in enumerate(lines[1:], 2)
    ]


def parse_line(path: Path, number: int, line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise Refused(f"{path}: line {number} is no JSON; this is no route trace, or it is damaged") from None


def check_header(path: Path, header: Any) -> dict[str, Any]:
    if not isinstance(header, dict) or header.get("route_trace") != VERSION:
        raise Refused(f"{path}: does not begin as a route trace of version {VERSION}")
    fields = FieldReader(header, str(path))
    layers = fields.wholes("layers")
    if not layers or len(set(layers)) < len(layers):
        fields.expected("layers", layers, "a list of different ids")
    fields.whole("top_k", low=1, high=fields.whole("num_experts", low=1, high=1 << 16))
    fields.whole("slot_bytes", high=1 << 53)
    return header


def check_event(path: Path, number: int, event: Any, layers: Collection[int], num_experts: int) -> Event:
    try:
        layer, rows, experts = event[:3]
        counts = event[3] if rows > 1 else [1] * len(experts)
        uses = dict(zip(experts, counts, strict=True))
        is_good = len(event) == (4 if rows > 1 else 3) and layer in layers and len(uses) == len(experts)
        is_good = is_good and is_list_of_counts([layer, rows, *experts, *counts])
        is_good = is_good and rows > 0 and max(uses, default=0) < num_experts and all(0 < n <= rows for n in counts)
    except (TypeError, ValueError, IndexError, KeyError):
        is_good = False
    if not is_good:
        raise Refused(f"{path}: line {number} is {show(event)}, expected [layer, rows, experts, rows of each]")
    return layer, rows, uses


def is_list_of_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
