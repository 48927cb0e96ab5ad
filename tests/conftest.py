"""Shared fixtures: a clean environment, the tiny reference models, and models loaded from them."""

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

# Before torch is imported: two threads of two workers wait for each other on two cores, for minutes beside other load.
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import pytest
import safetensors.torch

from tests.support.forked import environment, forker

# No test depends on the speed of a loaded machine, nor on which examples are generated this time.
hypothesis.settings.register_profile(
    "colibri",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("colibri")

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "tests" / "fixtures"
# The oracles of the reference implementation; _dense is the same weights with the indexer at rest.
ORACLES = ("glm_moe_dsa", "glm_moe_dsa_dense", "glm_moe_dsa_mtp", "glm_moe_dsa_groups", "glm_moe_dsa_fp8")

# Those of the other model types.
FAMILIES = (
    *("glm_moe_dsa_mtp", "glm_moe_dsa_fp8", "mixtral", "qwen3_moe", "olmoe", "glm4_moe"),
    *("deepseek_v3", "deepseek_v3_yarn", "deepseek_v32", "glm4_moe_lite", "deepseek_v2", "gpt_oss"),
)


def pytest_addoption(parser):
    parser.addoption("--sanitize", action="store_true", help="C kernels with sanitizers, as make native-asan sets up")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """No variable of the engine leaks in from the shell, none out of a test."""
    from settings import IGNORED, VARIABLES

    for name in (*VARIABLES, *IGNORED):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def no_leaks():
    """A test leaves no open file and no thread behind."""

    def open_files():
        folder = Path("/proc/self/fd")  # Linux alone
        found = set()
        for fd in folder.iterdir() if folder.exists() else ():
            with suppress(FileNotFoundError):  # closed meanwhile by another thread
                found.add(os.path.realpath(fd))
        return found

    def leaked():
        names = [name for name in open_files() - files if name.endswith((".safetensors", ".json"))]
        return names, max(0, threading.active_count() - threads)

    files, threads = open_files(), threading.active_count()
    yield
    if any(leaked()):
        gc.collect()  # 0.15 s: only where something may be held by what refers to itself
    assert leaked() == ([], 0), "(files left open, threads left running)"


@pytest.fixture(scope="session")
def oracle_folder(tmp_path_factory):
    """name -> a snapshot folder of that oracle."""
    dense = tmp_path_factory.mktemp("oracles") / "glm_moe_dsa_dense"
    shutil.copytree(FIXTURES / "glm_moe_dsa_dense", dense)
    shutil.copy(FIXTURES / "glm_moe_dsa" / "model.safetensors", dense)
    return lambda name: dense if name == "glm_moe_dsa_dense" else FIXTURES / name


@pytest.fixture
def text_folder(tmp_path):
    """A writable copy of what models/tiny has for text: config, tokenizer and template, no weights."""
    out = tmp_path / "text"
    out.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / "models" / "tiny" / name, out)
    return out


@pytest.fixture
def load():
    """load(folder, cap=0, **variables) -> LoadedModel with one thread; closed when the test ends."""
    from load.model import load_model
    from settings import Settings

    opened = []

    def load(folder, cap=0, expert_bits=16, dense_bits=16, **variables):
        environ = {"SNAP": str(folder), "USAGE": "0", "DRAFT": "0", "THREADS": "1"} | {
            name: str(value) for name, value in variables.items()
        }
        settings = Settings.read([str(cap), str(expert_bits), str(dense_bits)], environ)
        opened.append(load_model(settings))
        return opened[-1]

    yield load
    for loaded in opened:
        loaded.close()


@pytest.fixture
def serve(load):
    """serve(slots, max_queue, folder, saved, **variables) -> a Scheduler, closed when the test ends."""
    from generate.scheduler import Scheduler

    begun = []

    def serve(slots=4, max_queue=50, folder=FIXTURES / "glm_moe_dsa_mtp", saved=None, **variables):
        loaded = load(folder, **({"DRAFT": "auto", "cap": 3} | variables))
        begun.append(Scheduler(loaded, slots, max_queue, saved))
        return begun[-1]

    yield serve
    for scheduler in begun:
        scheduler.close()


@pytest.fixture
def run_colibri():
    """run_colibri(*arguments, **variables) -> the finished process of `python colibri.py`. is_new: of an interpreter of
    its own, not of a fork."""

    def run(*arguments, timeout=120, cwd=ROOT, is_new=False, **variables):
        environ = environment({"USAGE": "0"} | {name: str(value) for name, value in variables.items()})
        arguments = list(map(str, arguments))
        if not is_new:
            return forker().run(arguments, environ, cwd, timeout)
        command = [sys.executable, str(ROOT / "colibri.py"), *arguments]
        return subprocess.run(command, env=environ, cwd=cwd, capture_output=True, timeout=timeout)

    return run


def read_json(path):
    return json.loads(path.read_text())


def reference(name):
    """ref.json and the tensors of ref.safetensors of an oracle."""
    folder = FIXTURES / name / "expected"
    return read_json(folder / "ref.json"), safetensors.torch.load_file(folder / "ref.safetensors")


def write_fused(folder, out):
    """A copy of a snapshot with the experts of each layer in two 3-D tensors, as transformers keeps them in memory."""
    import torch

    shutil.copytree(folder, out, dirs_exist_ok=True)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    # Mixtral's own words, which it gives up with this naming.
    for word, usual in (("block_sparse_moe", "mlp"), ("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        tensors = {name.replace(f".{word}.", f".{usual}."): tensor for name, tensor in tensors.items()}
    experts = {}
    for name in [name for name in tensors if ".mlp.experts." in name]:
        layer, rest = name.split(".mlp.experts.")
        expert, matrix, _ = rest.split(".")
        experts.setdefault(layer, {})[int(expert), matrix] = tensors.pop(name)
    for layer, parts in experts.items():
        count = 1 + max(expert for expert, _ in parts)
        gate_up = [torch.cat([parts[e, "gate_proj"], parts[e, "up_proj"]]) for e in range(count)]
        tensors[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{layer}.mlp.experts.down_proj"] = torch.stack([parts[e, "down_proj"] for e in range(count)])
    safetensors.torch.save_file(tensors, out / "model.safetensors")
    return out
