"""Write docs/house.md: every file of the project with the first line of its docstring or comment, folder by folder.

    python dev/house_table.py

tests/test_house.py holds the document to what stands in the files.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "house.md"
SUFFIXES = (".py", ".c", ".h", ".inc")
FOLDERS = (  # in the order of imports, lowest first; then what is around them
    *("kernels", "machine", "snapshot", "text", "experts", "forward", "load", "generate", "server", "modes"),
    *("scripts", "dev", "bench", "tests"),
)
HEAD = """\
# The house

Made by `python dev/house_table.py` from the first line of each file; [README.md](../README.md) says what the folders
are for. Imports go one way: a folder uses those above it in this list, never those below.
"""


def files() -> list[str]:
    """What git tracks or would track, without fixtures and models."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return sorted(p for p in set(listed) if p.endswith(SUFFIXES) and "/fixtures/" not in p and (ROOT / p).exists())


def first_line(path: str) -> str:
    """The first line of a file's docstring or of its leading C comment; empty where it has none."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".py"):
        lead = ast.get_docstring(ast.parse(text)) or ""
    else:
        found = re.search(r"/\* *(.*?)\s*\*/", text, re.DOTALL)
        lead = found[1] if found else ""
    return lead.split("\n")[0].strip()


def table() -> str:
    """The document, as text."""
    lines, listed = [HEAD], files()
    for folder in ("", *FOLDERS):
        mine = [p for p in listed if (p.startswith(f"{folder}/") if folder else "/" not in p)]
        lines += [f"## {folder}/" if folder else "## The top", "", "| file | |", "|---|---|"]
        lines += [f"| {p.removeprefix(f'{folder}/')} | {first_line(p)} |" for p in mine if first_line(p)]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    DOCUMENT.write_text(table(), encoding="utf-8")
    print(f"{DOCUMENT} is written", file=sys.stderr)
