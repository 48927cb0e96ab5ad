"""Write docs/house.md: every folder with its purpose, every file with the first sentence of its docstring or comment.

    python dev/house_table.py

tests/test_house.py compares the document with the files.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine.interpreter  # noqa: F401 - first: what is missing is said in one line

# isort: split
from machine.console import say
from machine.exit import exit_code

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "house.md"
SUFFIXES = (".py", ".c", ".h")
FOLDERS = {  # product folders in the order of imports, lowest first; then what is around them
    "": "The command line, settings and errors.",
    "kernels": "Operations on arrays: defined in torch, computed in C. Arrays -> arrays.",
    "kernels/csrc": "The C kernels, compiled for the best instruction set at first use.",
    "machine": "What the operating system gives: memory, threads, files, console, exit codes.",
    "snapshot": "Checkpoint files -> named tensors, checked before anything is allocated.",
    "snapshot/families": "One file for each model type: config keys, tensor names and shapes.",
    "text": "Text <-> token ids: tokenizer, chat template, reasoning and tool-call parsers.",
    "experts": "Disk -> expert slot: reads, the expert cache, eviction policy, prefetch, usage history.",
    "forward": "One forward pass: embedding, layers, router, MoE, lm_head; the KV cache it fills.",
    "forward/attention": "MLA with the DSA indexer, and GQA with sliding windows and attention sinks.",
    "load": "What fits the memory budget, and the loaded model.",
    "generate": "Prefill, decode, sampling, speculative decoding, continuous batching, KV slots.",
    "generate/tools": "Tools that a model may call while it generates: calculator and Python sandbox.",
    "server": "Requests from outside -> the scheduler, and answers back.",
    "server/openai": "The OpenAI API: fields of requests, objects of responses.",
    "server/transport": "HTTP below the API: listening, access control, bodies, event streams.",
    "server/stdio": "The line protocol of the C engine over a pipe.",
    "modes": "What `python colibri.py` does: generate, chat, score, serve, replay, check; the report of a run.",
    "scripts": "Programs for users: convert, plan, chat, lm_eval, compile the kernels.",
    "scripts/smollm": "SmolLM2 as a Mixtral, for get_smollm.py.",
    "dev": "Programs for developers: fixtures, training, quality, soak, traces, tables of the docs.",
    "dev/synthetic": "Snapshots of random weights in real shapes, for make_synthetic.py.",
    "dev/tiny": "The training of models/tiny, for train_tiny.py.",
    "bench": "Benchmarks: kernels, decode, streaming, serving, speculation.",
    "bench/side_by_side": "This engine beside llama.cpp and the C engine, for peers.py.",
    "tests": "House rules, settings, shared fixtures; each folder below tests the folder of its name.",
    "tests/support": "Helpers of tests: processes, servers, schedulers.",
}
HEAD = """\
# The house

Made by `python dev/house_table.py` from the first sentence of each file; [glossary.md](glossary.md) explains the words.
Imports go one way: a product folder uses those above it in this list, never those below.
"""


def files() -> list[str]:
    """Source files that git tracks or would track, without fixtures."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return sorted(p for p in set(listed) if p.endswith(SUFFIXES) and "/fixtures/" not in p and (ROOT / p).exists())


def first_sentence(path: str) -> str:
    """The first sentence of a file's docstring or of its leading C comment; empty where it has none."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".py"):
        lead = ast.get_docstring(ast.parse(text)) or ""
    else:
        found = re.search(r"/\* *(.*?)\s*\*/", text, re.DOTALL)
        lead = re.sub(r"\n *\*? *", "\n", found[1]) if found else ""
    paragraph = " ".join(lead.split("\n\n")[0].split())
    return re.split(r"(?<=[.?!]) ", paragraph)[0].replace("|", "\\|")


def table() -> str:
    """The document, as text."""
    folders: dict[str, list[str]] = {folder: [] for folder in FOLDERS}
    for path in files():
        folders.setdefault(str(Path(path).parent).removeprefix("."), []).append(path)
    lines = [HEAD]
    for folder, paths in folders.items():
        name = f"{folder}/" if folder else "The top"
        lines += [f"{'###' if '/' in folder else '##'} {name}", ""]
        lines += [FOLDERS[folder], ""] if folder in FOLDERS else []
        lines += ["| file | |", "|---|---|"]
        sentences = {Path(path).name: first_sentence(path) for path in paths}
        lines += [f"| {name} | {sentence} |" for name, sentence in sentences.items() if sentence]
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    DOCUMENT.write_text(table(), encoding="utf-8")
    say(f"{DOCUMENT} is written")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("house_table", main))
