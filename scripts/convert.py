"""Convert any snapshot that the engine reads into a container: fewer bits, and one aligned read for each expert.

    python scripts/convert.py /models/GLM-5.2-FP8 /models/glm-5.2-int4
    python scripts/convert.py SRC DST --experts 4 --dense 8 --embeddings 8 --mtp 8
    python scripts/convert.py SRC DST --verify

SRC is only read. Matrices are quantized in groups of 64 columns with 16-bit scales (4 bits: 4.25 a weight); a matrix
that already has as few bits is copied, and so are norms, routers and biases. DST gets a shard (file) for each layer,
the tokenizer, the chat template and the configs. Started again after an interruption, it continues with the first
shard that is missing, and the bytes are the same. --verify reads a complete DST back: the checksum of each shard, and
every matrix against SRC.

Memory: each thread holds one expert or matrix until it is written. The largest are the embedding and the head, which
may be in work together. Those of GLM-5.2 are about 1 GB each quantized to 8 bits and 2 GB each copied as BF16, so 2 or
4 GB are needed beside Python and torch. --verify holds copied tensors twice, and quantized ones a few rows at a time.

Exit code 0 when DST is complete (and verified, if asked), 1 when --verify finds a difference, 2 for bad input,
130 when interrupted.
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine.interpreter  # noqa: F401 - first: what is missing is said in one line

# isort: split
import torch
from torch import Tensor

from errors import Refused, printable
from kernels.formats import GROUPS
from kernels.quantize import quantize_with_scales, row_blocks
from load.notices import snapshot_notices
from machine.console import Terminal, say, set_up_terminal, show_bar
from machine.exit import exit_code
from machine.files import PARTIAL, atomic_write
from scripts.container import CHECKSUM, UNKNOWN, Shard, replace_checksum
from scripts.conversion import Conversion, ConversionOptions, ConvertedMatrix, Item
from settings import terminal_is_dumb
from snapshot.dense import read_entry_bytes, read_stored_weight
from snapshot.folder import own_files
from snapshot.formats import find_stored_weight
from snapshot.gguf_files import is_gguf
from snapshot.index import INDEX_FILE, TensorIndex, read_header, read_index
from snapshot.opening import locate
from snapshot.reader import FileReader, open_file, read_file
from text.chat_template import named_template_files

COMPANIONS = (
    "config.json generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json "
    "vocab.json merges.txt chat_template.jinja chat_template.json LICENSE"
).split()
SPARE_BYTES = 1 << 30  # of the disk, which stay free
READ_BYTES = 8 << 20
MAX_LISTED = 10  # differences


T = TypeVar("T")
R = TypeVar("R")


class ConversionProgress:
    """A bar on a terminal, a line for each shard otherwise, on stderr."""

    def __init__(self, label: str, total_bytes: int) -> None:
        self.label = label
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self.started = self.shown_at = time.monotonic()

    def add(self, num_bytes: int, shard: str) -> None:
        self.done_bytes += num_bytes
        now = time.monotonic()
        if Terminal.has_bar and now - self.shown_at > 0.2:
            self.shown_at = now
            show_bar(f"[{self.label}]", self.done_bytes / self.total_bytes, seconds=0, detail=self.numbers())

    def count(self, contents: Iterable[list[Tensor]], shard: str) -> Iterator[Tensor]:
        """Yield the tensors of all lists; their bytes count once all of a list are taken."""
        for tensors in contents:
            yield from tensors
            self.add(sum(tensor.numel() * tensor.element_size() for tensor in tensors), shard)

    def line(self, shard: str) -> str:
        return f"[{self.label}] {shard} | {self.numbers()}"

    def numbers(self) -> str:
        seconds = max(time.monotonic() - self.started, 1e-3)
        speed = self.done_bytes / seconds
        left = (self.total_bytes - self.done_bytes) / max(speed, 1)
        return (
            f"{self.done_bytes / 1e9:.2f} of {self.total_bytes / 1e9:.2f} GB | "
            f"{speed / 1e6:.0f} MB/s | {int(left // 60)} min {int(left % 60)} s left"
        )


def convert(conversion: Conversion, out: Path, num_threads: int) -> int:
    """Write every shard that is not there yet -> bytes written."""
    for path in own_files(out, ".safetensors"):
        if path.name not in conversion.shards:
            raise Refused(f"{path}: is no file of this container; name an empty folder, or delete what is there")
    if os.path.lexists(out / INDEX_FILE):
        # The engine would read the files that it lists instead of those of the container.
        raise Refused(f"{out / INDEX_FILE}: belongs to another snapshot; name an empty folder, or delete what is there")
    missing = [shard for shard in map(conversion.shard, conversion.shards) if not is_written(shard, out)]
    total = sum(shard.num_bytes for shard in missing)
    check_disk(out, total, conversion.shards)
    # A link to nothing is a broken download: read_file refuses it before anything is written.
    sources = [conversion.folder / name for name in COMPANIONS]
    sources += named_template_files(conversion.folder)
    companions = {path.relative_to(conversion.folder): read_file(path) for path in sources if os.path.lexists(path)}
    if num_present := len(conversion.shards) - len(missing):
        say(f"[convert] {num_present} of {len(conversion.shards)} files are there already")
    for name, data in companions.items():
        (out / name).parent.mkdir(exist_ok=True)
        with atomic_write(out / name, keep_partial=True) as file:
            file.write(data)
    progress = ConversionProgress("convert", total)
    for shard in missing:
        groups = conversion.shards[shard.name]
        contents = in_threads(lambda group: group.read_contents(conversion.reader), groups, num_threads)
        shard.write(out, progress.count(contents, shard.name))
        say(progress.line(shard.name))
    return total


def in_threads(work: Callable[[T], R], items: Iterable[T], num_threads: int) -> Iterator[R]:
    """map(work, items) in order, with about num_threads items in work at once, which bounds the memory."""
    with ThreadPoolExecutor(num_threads) as pool:
        pending: deque[Future[R]] = deque()
        try:
            for item in items:
                pending.append(pool.submit(work, item))
                if len(pending) > num_threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def locked_folder(out: Path) -> Iterator[None]:
    """Create the folder where it is missing, and lock it: two processes that write one file would corrupt it."""
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out, os.O_RDONLY | os.O_CLOEXEC)  # of the folder itself, so no lock file stays behind
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"{out}: another conversion is writing there; wait for it, or name another folder") from None
        except OSError as error:  # some network file systems cannot lock a folder
            name = printable(str(out))
            say(f"[convert] {name} cannot be locked ({error.strerror}); start no second conversion into it")
        yield
    finally:
        os.close(descriptor)


def is_written(shard: Shard, out: Path) -> bool:
    """True if the shard exists, by its size and its whole header. Refused for a file of another conversion."""
    path = out / shard.name
    if not path.exists():
        return False
    with open(open_file(path), "rb") as file:
        size, header = os.fstat(file.fileno()).st_size, file.read(len(shard.header))
    if replace_checksum(header, UNKNOWN) != shard.header:
        raise Refused(f"{path}: is of another source or other options; name an empty folder, or delete what is there")
    if size != shard.num_bytes:
        raise Refused(f"{path}: has {size} bytes instead of {shard.num_bytes}, it is damaged; delete it, then repeat")
    return True


def check_disk(out: Path, num_bytes: int, shards: Iterable[str]) -> None:
    """Refuse a conversion that does not fit; the partial file of a shard counts as free, as it is overwritten."""
    partials = [out / (shard + PARTIAL) for shard in shards]
    partial = sum(path.stat().st_size for path in partials if path.exists())
    free = shutil.disk_usage(out).free + partial
    if num_bytes and num_bytes + SPARE_BYTES > free:
        raise Refused(
            f"{out}: {num_bytes / 1e9:.2f} GB remain to be written and 1 GB must stay free, "
            f"the disk has {free / 1e9:.2f} GB; free some, or choose fewer bits"
        )


def verify(conversion: Conversion, out: Path, num_threads: int) -> tuple[list[str], dict[str, float]]:
    """Check the checksum of every shard, and every tensor against the source.

    -> (a line for each difference, {role and format: relative error of its quantized matrices}). A copied tensor must
    be equal byte by byte. A quantized one must hold, for the scales it has, the codes that the source gives.
    """
    index, reader = read_index(out), FileReader()
    problems: list[str] = []
    errors: dict[str, list[float]] = {}  # role and format -> [sum of squared errors, sum of squares]
    progress = ConversionProgress("verify", sum((out / shard).stat().st_size for shard in conversion.shards))
    try:
        for shard, groups in conversion.shards.items():
            if checksum(out / shard) != read_header(out / shard)[1].get(CHECKSUM):
                problems.append(f"{shard}: its bytes do not have the checksum of its header")
            items = [item for group in groups for item in group.items]
            found = in_threads(lambda item: compare_item(item, conversion, index, reader), items, num_threads)
            for item, (problem, role, error, power) in zip(items, found, strict=True):
                if problem:
                    problems.append(problem)
                if role:
                    sums = errors.setdefault(role, [0.0, 0.0])
                    errors[role] = [sums[0] + error, sums[1] + power]
                progress.add(sum(tensor.num_bytes for tensor in item.tensors), shard)
            say(progress.line(shard))
    finally:
        reader.close()
    return problems, {role: (error / power) ** 0.5 for role, (error, power) in errors.items() if power}


def compare_item(
    item: Item, conversion: Conversion, index: TensorIndex, reader: FileReader
) -> tuple[str | None, str | None, float, float]:
    """Read one matrix or copy from both sides.

    -> (problem or None, role and format or None for a copy, sum of squared errors, sum of squares)
    """
    if not isinstance(item, ConvertedMatrix) or item.target is None:
        for tensor, before in zip(item.tensors, item.read_contents(conversion.reader), strict=True):
            after = read_entry_bytes(reader, index.find_entry(tensor.name))
            if not torch.equal(after, before):
                return f"{tensor.name}: is not a copy of the source's", None, 0.0, 0.0
        return None, None, 0.0, 0.0
    stored = find_stored_weight(index, item.name, (item.stored.rows, item.stored.columns))
    problem, error, power = None, 0.0, 0.0
    for start, stop in row_blocks(stored.rows, stored.columns):
        source = read_stored_weight(conversion.reader, item.stored.slice_rows(start, stop)).dequantize()
        weight = read_stored_weight(reader, stored.slice_rows(start, stop))
        if (
            weight.format != item.target
            or weight.scales is None
            or not torch.equal(quantize_with_scales(source, weight.scales, item.target), weight.data)
        ):
            problem = f"{item.name}: its codes are not those of the source"
        error += (weight.dequantize() - source).square_().sum(dtype=torch.float64).item()
        power += source.square().sum(dtype=torch.float64).item()
    return problem, f"{item.role} {item.target}", error, power


def checksum(path: Path) -> str:
    """SHA-256 of all bytes after the header of a safetensors file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        while data := file.read(READ_BYTES):
            digest.update(data)
    return digest.hexdigest()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="SRC")
    parser.add_argument("out", type=Path, metavar="DST")
    bits = (16, 8, 4, 3, 2)
    parser.add_argument("--experts", type=int, choices=bits, default=4, help="bits of routed experts (default 4)")
    parser.add_argument("--dense", type=int, choices=bits, default=4, help="of attention, dense and shared MLPs (4)")
    parser.add_argument("--embeddings", type=int, choices=bits, default=8, help="of the embedding and lm_head (8)")
    parser.add_argument("--mtp", type=int, choices=(*bits, 0), default=8, help="of the MTP layer (8); 0 leaves it out")
    parser.add_argument(
        "--group",
        type=int,
        choices=(*GROUPS, 0),
        default=64,
        help="columns of a group, 0 = a row (64); 3 bits are always in groups of 64",
    )
    parser.add_argument("--scales", choices=("F16", "F32"), default="F16", help="dtype of the scales (F16)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="matrices quantized at once (all cores)")
    parser.add_argument("--verify", action="store_true", help="read DST back and compare it with SRC")
    args = parser.parse_args(arguments)
    fields = {name: getattr(args, name) for name in ConversionOptions.__dataclass_fields__}
    torch.set_num_threads(1)  # the threads are over matrices
    args.interrupted = "interrupted; the same command continues with the file it was at"
    return exit_code("convert", lambda: run(args, ConversionOptions(**fields)), lambda: str(args.interrupted))


def run(args: argparse.Namespace, options: ConversionOptions) -> int:
    if not args.source.is_dir() and not is_gguf(args.source):
        raise Refused(f"{args.source}: no such folder; SRC must name a Hugging Face snapshot folder")
    if args.out.exists() and not args.out.is_dir():
        raise Refused(f"{args.out}: is a file; DST must name a folder")
    if args.out.exists() and args.out.samefile(args.source):
        raise Refused(f"{args.out}: is SRC itself, which is never written; name another folder")
    set_up_terminal(terminal_is_dumb())
    started = time.monotonic()
    source = locate(args.source)
    if not source.is_dir():
        raise Refused(f"{source}: is a GGUF, which runs as it is (SNAP) and is not converted yet")
    conversion = Conversion(source, options)
    for line in snapshot_notices(conversion.dense):
        say(line)
    try:
        with locked_folder(args.out):
            written = convert(conversion, args.out, max(1, args.threads))
            size = sum((args.out / shard).stat().st_size for shard in conversion.shards)
            before = sum(entry.num_bytes for entry in conversion.index.entries.values())
            seconds = time.monotonic() - started
            sizes = f"{size / 1e9:.3f} GB from {before / 1e9:.3f} GB"
            print(f"{printable(str(args.out))}: {sizes}, {written / 1e9:.3f} GB written in {seconds:.0f} s")
            if not args.verify:
                return 0
            args.interrupted = "interrupted; every file is written, verifying starts anew"
            problems, errors = verify(conversion, args.out, max(1, args.threads))
    finally:
        conversion.reader.close()
    for role, error in errors.items():
        print(f"{role}: relative error {error:.4f} (root of squared errors over squares)")
    for problem in problems[:MAX_LISTED]:
        print(f"DIFFERS {problem}")
    print(f"verify: {len(problems)} differences" if problems else "verify: no differences")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
