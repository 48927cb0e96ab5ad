"""Write a snapshot of random weights in the shapes of a real model, with realistic routing, for benchmarks.

    python dev/make_synthetic.py glm-5.2 /tmp/glm --layers 4 --vocab 32768 --format int4-g64
    python dev/make_synthetic.py small /tmp/small --hidden 512 --moe-width 512 --format bf16

The first layer is dense, the others are sparse. The files are those of a container (docs/formats.md), written at about
the speed of the disk. ref_glm.json gets --prompt and --tokens ids for REPLAY. The weights are random but for the
structure that makes the routing (dev/synthetic/structure.py).

--routing uniform: ids sampled evenly, experts used evenly, little overlap from one token to the next.
--routing trace: like traces of real models. Popularity about Zipf over the experts; of the experts that a window of 128
tokens uses, about 13 % were not used in the window before; the route of a token depends on the tokens before it, so
the same id uses other experts elsewhere. The ids are no text but have the statistics of one: Zipf, with topics that
change (dev/synthetic/text.py).

At the end the engine runs --report-tokens of the ids and the script prints statistics of the routing; 0 skips it.
Exit code 2 is bad input or a full disk, with an error of one line; sizes that the engine refuses are refused at once.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine.interpreter  # noqa: F401 - first: what is missing is said in one line

# isort: split
import numpy as np

from dev.synthetic.fill import Filler, Formats
from dev.synthetic.report import print_report
from dev.synthetic.shapes import DEFAULTS, make_config
from dev.synthetic.structure import ROUTINGS
from dev.synthetic.tensors import Groups, model_groups
from dev.synthetic.text import topic_ids, uniform_ids
from errors import Refused
from kernels.formats import FORMATS, MXFP4
from machine.exit import exit_code
from scripts.container import Shard
from snapshot.config_fields import ConfigFields
from snapshot.config_file import parse_model_config
from snapshot.folder import own_files

SOURCE = "dev/make_synthetic.py"
SMALLS_OWN = ("hidden", "moe_width", "active", "index_topk")
LEAST = {"hidden": 64, "vocab": 16, "report_tokens": 0, "seed": 0}  # of the others 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=DEFAULTS)
    parser.add_argument("out", type=Path, metavar="DST")
    for name in ("layers", "experts", "vocab", "prompt", "tokens", "report_tokens"):
        parser.add_argument(option(name), type=int)
    for name in SMALLS_OWN:
        parser.add_argument(option(name), type=int, help="of the model small alone")
    formats = [name for name in FORMATS if name != MXFP4.name]  # which is read, never written
    parser.add_argument("--format", choices=formats, default="int4-g64", help="of the routed experts", metavar="FORMAT")
    parser.add_argument("--dense-format", choices=formats, help="of the rest; by default the same", metavar="FORMAT")
    parser.add_argument(
        "--scales", choices=("F16", "F32"), default="F16", help="dtype of the scales of integer formats"
    )
    parser.add_argument("--routing", choices=ROUTINGS, default="trace")
    parser.add_argument("--no-indexer", action="store_true", help="attention to every position, without DSA")
    parser.add_argument("--seed", type=int, default=1)
    return parser


def fill_in(args: argparse.Namespace) -> dict[str, Any]:
    """Set defaults of missing options -> config.json. Refused for invalid sizes, here or for the engine, before any
    file is written."""
    for name, value in DEFAULTS[args.name].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
        elif args.name != "small" and name in SMALLS_OWN:
            raise Refused(f"{option(name)} is for the model small, {args.name} has its own")
    for name in (*DEFAULTS[args.name], "seed"):
        value, least = getattr(args, name), LEAST.get(name, 1)
        if value < least:
            raise Refused(f"{option(name)} is {value}, it must be {least} or more")
    args.active = min(args.active, args.experts)
    args.report_tokens = min(args.report_tokens, args.prompt + args.tokens)
    config = make_config(args.name, args)
    parse_model_config(ConfigFields(config, "the engine runs no model of these sizes"))
    return config


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def plan_files(
    args: argparse.Namespace, config: dict[str, Any], filler: Filler, rng: np.random.Generator
) -> Iterator[tuple[Groups, Shard]]:
    """Yield the tensors of each file in groups, and its Shard."""
    for number, groups in enumerate(model_groups(config, ROUTINGS[args.routing], rng), 1):
        name = f"model-{number:05d}-of-{args.layers + 1:05d}.safetensors"
        yield groups, Shard(name, [filler.group_parts(group) for group in groups], filler.formats_of(groups), SOURCE)


def write_snapshot(args: argparse.Namespace, config: dict[str, Any]) -> tuple[int, float]:
    """Write config.json, the weights and ref_glm.json -> (bytes, seconds) of the weights."""
    # One generator for each purpose, so that all formats get the same text and the same routers.
    of_text, of_structure, of_weights = (np.random.default_rng([args.seed, purpose]) for purpose in range(3))
    formats = Formats(FORMATS[args.format], FORMATS[args.dense_format or args.format])
    filler = Filler(formats, args.scales, args.hidden * args.moe_width, of_weights)
    if args.out.exists() and not args.out.is_dir():
        raise Refused(f"{args.out}: is a file; DST must name a folder")
    args.out.mkdir(parents=True, exist_ok=True)
    if own_files(args.out, ".safetensors"):
        raise Refused(f"{args.out}: holds weights already; name another folder, or empty it")
    total = sum(shard.num_bytes for _, shard in plan_files(args, config, filler, np.random.default_rng(0)))
    have = shutil.disk_usage(args.out).free
    if total > have:
        raise Refused(f"{args.out}: needs {total / 1e9:.1f} GB, the disk has {have / 1e9:.1f} GB left")
    started = time.perf_counter()
    for groups, shard in plan_files(args, config, filler, of_structure):
        buffers = (buffer for group in groups for buffer in filler.group_buffers(group))
        shard.write(args.out, buffers, with_checksum=False)  # these files are never verified
    seconds = time.perf_counter() - started
    ids = (uniform_ids if args.routing == "uniform" else topic_ids)(args.vocab, args.prompt + args.tokens, of_text)
    (args.out / "ref_glm.json").write_text(json.dumps({"prompt_ids": ids[: args.prompt], "full_ids": ids}) + "\n")
    # Last: a folder without config.json is no snapshot, so an unfinished one is not taken for one.
    (args.out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return total, seconds


def main(arguments: list[str] | None = None) -> int:
    args = make_parser().parse_args(arguments)

    def run() -> int:
        try:
            total, seconds = write_snapshot(args, fill_in(args))
        except OSError as error:
            what = f"{error.filename or args.out}: {error.strerror or error}"
            raise Refused(what + unfinished(args.out)) from None
        print(f"{args.out}: {total / 1e9:.2f} GB in {seconds:.1f} s, {total / seconds / 1e9:.2f} GB/s")
        if args.report_tokens and args.layers > 1:
            print_report(args.out, args.report_tokens)
        return 0

    return exit_code("make_synthetic", run, lambda: f"interrupted{unfinished(args.out)}")


def unfinished(folder: Path) -> str:
    """A hint to delete a folder whose weights are incomplete, or an empty text."""
    begun = (
        folder.is_dir()
        and bool(own_files(folder, ".safetensors", ".safetensors.partial"))
        and not (folder / "config.json").exists()
    )
    return f"; {folder} is unfinished, delete it" if begun else ""


if __name__ == "__main__":
    sys.exit(main())
