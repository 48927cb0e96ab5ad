"""Convert any snapshot that the engine reads into a container: fewer bits, and one aligned read for each expert.

    python scripts/convert.py /models/GLM-5.2-FP8 /models/glm-5.2-int4
    python scripts/convert.py SRC DST --experts 4 --dense 8 --embeddings 8 --mtp 8
    python scripts/convert.py SRC DST --verify

SRC is only read. Matrices are quantized in groups of 64 columns with 16-bit scales (4 bits: 4.25 a weight); a matrix
that has as few bits already is copied as it is, and so are norms, routers and biases. DST gets a file for each layer,
the tokenizer, the chat template and the configs. Started again after an interruption it goes on where it was, and the
bytes are the same. --verify reads DST back when it is whole: the checksum of each file, and every matrix against SRC.

Memory: what is under way at once, an expert or a matrix for each thread, is held whole before it is written. The
largest are the embedding and the head, which may be under way together. Those of GLM-5.2 are about 1 GB each packed to
8 bits and 2 GB each copied as BF16, so 2 or 4 GB are needed beside what Python and torch take. --verify holds what was
copied twice, and what was packed a few rows at a time.

Exit code 0 when DST is whole (and verified, if asked), 1 when --verify finds a difference, 2 for bad input,
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from errors import Refused, printable
from kernels.formats import GROUPS
from kernels.quantize import quantize_with_scales, row_blocks
from machine.files import PARTIAL, atomic_write
from scripts.container import CHECKSUM, UNKNOWN, with_checksum_of, write_shard
from scripts.conversion import Conversion, ConversionOptions, ConvertedMatrix
from snapshot.dense import read_entry_bytes, read_stored_weight
from snapshot.formats import find_stored_weight
from snapshot.index import INDEX_FILE, read_header, read_index
from snapshot.reader import FileReader, open_file, read_file

COMPANIONS = (
    "config.json generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json "
    "vocab.json merges.txt chat_template.jinja chat_template.json LICENSE"
).split()
SPARE_BYTES = 1 << 30  # of the disk that stay free
READ_BYTES = 8 << 20
MAX_ERRORS = 10  # differences that are told one by one


class ConversionProgress:
    """A bar on a terminal, a line for each file otherwise, on stderr."""

    def __init__(self, word, total_bytes):
        self.word, self.total, self.done = word, total_bytes, 0
        self.started = self.last = time.monotonic()

    def add(self, num_bytes, file):
        self.done += num_bytes
        now = time.monotonic()
        if sys.stderr.isatty() and (now - self.last > 0.2 or self.done >= self.total):
            self.last = now
            filled = int(24 * self.done / self.total)
            print(f"\r{self.line(file)} {'#' * filled}{'.' * (24 - filled)} ", end="", file=sys.stderr, flush=True)

    def counted(self, groups, file):
        """The tensors of lists of tensors, one by one; what has been taken is counted."""
        for tensors in groups:
            yield from tensors
            self.add(sum(tensor.numel() * tensor.element_size() for tensor in tensors), file)

    def end_of_file(self, file):
        print(("\r\x1b[K" if sys.stderr.isatty() else "") + self.line(file), file=sys.stderr, flush=True)

    def line(self, file):
        seconds = max(time.monotonic() - self.started, 1e-3)
        speed = self.done / seconds
        left = (self.total - self.done) / max(speed, 1)
        return (
            f"[{self.word}] {file} | {self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB | {speed / 1e6:.0f} MB/s | "
            f"{int(left // 60)} min {int(left % 60)} s left"
        )


def convert(conversion, out, num_threads):
    """Write every file that is not there yet -> bytes written."""
    sizes = {file: conversion.num_bytes(file) for file in conversion.shards}
    for path in out.glob("*.safetensors"):
        if path.name not in sizes:
            raise Refused(f"{path}: is no file of this container; name an empty folder, or delete what is there")
    if os.path.lexists(out / INDEX_FILE):
        # The engine would read the files it lists and not those of the container.
        raise Refused(f"{out / INDEX_FILE}: belongs to another snapshot; name an empty folder, or delete what is there")
    missing = [file for file in sizes if not is_written(conversion, out / file)]
    total = sum(sizes[file] for file in missing)
    check_disk(out, total, sizes)
    # A link to nothing is a broken download: read_file refuses it before anything is written.
    present = [name for name in COMPANIONS if os.path.lexists(conversion.folder / name)]
    companions = {name: read_file(conversion.folder / name) for name in present}
    if len(missing) < len(sizes):
        print(f"[convert] {len(sizes) - len(missing)} of {len(sizes)} files are there already", file=sys.stderr)
    for name, data in companions.items():
        with atomic_write(out / name, keep_partial=True) as file:
            file.write(data)
    progress = ConversionProgress("convert", total)
    for file in missing:
        groups = conversion.shards[file]

        work = in_threads(lambda group: group.tensors(conversion.reader), groups, num_threads)
        buffers = progress.counted(work, file)
        parts = [group.parts for group in groups]
        write_shard(out / file, parts, buffers, conversion.formats(file), conversion.source)
        progress.end_of_file(file)
    return total


def in_threads(work, items, num_threads):
    """map(work, items) with a few items under way at once, in order: memory stays bounded by them."""
    with ThreadPoolExecutor(num_threads) as pool:
        pending = deque()
        try:
            for item in items:
                pending.append(pool.submit(work, item))
                if len(pending) > num_threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


@contextmanager
def locked(out):
    """The folder, made if need be, for this process alone: two that write the same file would break it."""
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out, os.O_RDONLY | os.O_CLOEXEC)  # the folder's own, so no file stays behind
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"{out}: another conversion is writing there; wait for it, or name another folder") from None
        except OSError as error:  # some network file systems lock no folder
            reason = f"{printable(str(out))} cannot be locked ({error.strerror})"
            print(f"[convert] {reason}; start no second conversion into it", file=sys.stderr)
        yield
    finally:
        os.close(descriptor)


def is_written(conversion, path):
    """Whether a file of this very conversion is there: its length and its whole header. Another file is refused."""
    if not path.exists():
        return False
    expected = conversion.header(path.name)
    with open(open_file(path), "rb") as file:
        size, header = os.fstat(file.fileno()).st_size, file.read(len(expected))
    if with_checksum_of(header, UNKNOWN) != expected:
        raise Refused(f"{path}: is of another source or other options; name an empty folder, or delete what is there")
    num_bytes = conversion.num_bytes(path.name)
    if size != num_bytes:
        raise Refused(f"{path}: has {size} bytes instead of {num_bytes}, it is broken; delete it and start again")
    return True


def check_disk(out, num_bytes, files):
    """Refuse to begin what will not fit; a partial one of `files` counts as free, for it is written anew."""
    partials = [out / (file + PARTIAL) for file in files]
    partial = sum(path.stat().st_size for path in partials if path.exists())
    free = shutil.disk_usage(out).free + partial
    if num_bytes and num_bytes + SPARE_BYTES > free:
        raise Refused(
            f"{out}: {num_bytes / 1e9:.2f} GB are still to be written and 1 GB is to stay free, "
            f"the disk has {free / 1e9:.2f} GB; free some, or choose fewer bits"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Reading it back


def verify(conversion, out, num_threads):
    """The checksum of every file, and every tensor against the source -> what differs, a line each.

    A copied tensor must be equal byte by byte. A quantized one must hold, for the scales it has, the codes that the
    source gives; its error is summed up by role.
    """
    index, reader = read_index(out), FileReader()
    problems, errors = [], {}
    progress = ConversionProgress("verify", sum((out / file).stat().st_size for file in conversion.shards))
    try:
        for file, groups in conversion.shards.items():
            if checksum(out / file) != read_header(out / file)[1].get(CHECKSUM):
                problems.append(f"{file}: its bytes do not have the checksum of its header")
            work = [item for group in groups for item in group.items]
            found = in_threads(lambda item: compare(item, conversion, index, reader), work, num_threads)
            for item, (problem, role, error, power) in zip(work, found, strict=True):
                problems += [problem] if problem else []
                total = errors.setdefault(role, [0.0, 0.0])
                total[0], total[1] = total[0] + error, total[1] + power
                progress.add(sum(part.num_bytes for part in item.parts), file)
            progress.end_of_file(file)
    finally:
        reader.close()
    return problems, {role: (error / power) ** 0.5 for role, (error, power) in errors.items() if role and power}


def compare(item, conversion, index, reader):
    """One matrix or copy, read from both -> (problem or None, role, sum of squared errors, sum of squares)."""
    if not isinstance(item, ConvertedMatrix) or item.target is None:
        for part, before in zip(item.parts, item.tensors(conversion.reader), strict=True):
            after = read_entry_bytes(reader, index.find_entry(part.name))
            if not torch.equal(after, before):
                return f"{part.name}: is not a copy of the source's", None, 0.0, 0.0
        return None, None, 0.0, 0.0
    stored = find_stored_weight(index, item.name, (item.stored.rows, item.stored.columns))
    problem, error, power = None, 0.0, 0.0
    for start, stop in row_blocks(stored.rows, stored.columns):
        source = read_stored_weight(conversion.reader, item.stored.slice_rows(start, stop)).dequantize()
        weight = read_stored_weight(reader, stored.slice_rows(start, stop))
        if weight.format != item.target or not torch.equal(
            quantize_with_scales(source, weight.scales, item.target), weight.data
        ):
            problem = f"{item.name}: its codes are not those of the source"
        error += (weight.dequantize() - source).square_().sum(dtype=torch.float64).item()
        power += source.square().sum(dtype=torch.float64).item()
    return problem, f"{item.role} {item.target}", error, power


def checksum(path):
    """SHA-256 of all that follows the header of a safetensors file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        while data := file.read(READ_BYTES):
            digest.update(data)
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------------------------


def main(arguments):
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
    try:
        return run(args, ConversionOptions(**fields))
    except Refused as error:
        print(f"convert: {error}", file=sys.stderr)
    except OSError as error:
        print(f"convert: {error.filename or args.out}: {error.strerror}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\nconvert: interrupted; the same command goes on with the file it was at", file=sys.stderr)
        return 130
    return 2


def run(args, options):
    if not args.source.is_dir():
        raise Refused(f"{args.source}: no such folder; SRC must name a Hugging Face snapshot folder")
    if args.out.exists() and not args.out.is_dir():
        raise Refused(f"{args.out}: is a file; DST must name a folder")
    if args.out.exists() and args.out.samefile(args.source):
        raise Refused(f"{args.out}: is SRC itself, which is never written; name another folder")
    started, conversion = time.monotonic(), Conversion(args.source, options)
    try:
        with locked(args.out):
            written = convert(conversion, args.out, max(1, args.threads))
            size = sum((args.out / file).stat().st_size for file in conversion.shards)
            before = sum(entry.num_bytes for entry in conversion.index.entries.values())
            seconds = time.monotonic() - started
            sizes = f"{size / 1e9:.3f} GB from {before / 1e9:.3f} GB"
            print(f"{printable(str(args.out))}: {sizes}, {written / 1e9:.3f} GB written in {seconds:.0f} s")
            if not args.verify:
                return 0
            try:
                return report(*verify(conversion, args.out, max(1, args.threads)))
            except KeyboardInterrupt:
                print("\nconvert: interrupted; every file is written, verifying starts anew", file=sys.stderr)
                return 130
    finally:
        conversion.reader.close()


def report(problems, errors):
    """Print what verify found -> exit code."""
    for role, error in errors.items():
        print(f"{role}: relative error {error:.4f} (root of squared errors over squares)")
    for problem in problems[:MAX_ERRORS]:
        print(f"DIFFERS {problem}")
    print(f"verify: {len(problems)} differences" if problems else "verify: every file and every matrix is right")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
