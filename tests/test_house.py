"""The layout of the tree: imports go one way, the environment is read once, documents match the code."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from dev import house_table
from dev.model_table import DOCUMENT, table
from settings import IGNORED, RENAMED, VARIABLES
from tests.conftest import ROOT

# An import may point to the left, or to the same room.
ROOMS = "errors kernels machine settings snapshot text experts forward load generate server modes".split()
ENTRY_POINTS = ("colibri", "scripts", "dev", "bench", "tests")
PRODUCT = (*ROOMS, "colibri", "scripts")
MAX_LINES = 600
MAX_PRODUCT_LINES = 350
LONGER = ("kernels/csrc/simd.h",)
MAX_README_LINES = 130
# Words that readers from the field do not know, and the field's term (docs/glossary.md).
PRIVATE_WORDS = {
    r"KV state|timeline": "KV cache",
    r"governor": "draft length",
    r"in vain": "wasted",
    r"in any company": "in any batch",
    r"words_of": "a specific name",
    r"in common with": "shared prefix",
    r"\bguess(es|ed)?\b": "draft tokens, predicted experts",
    r"quantis|normalis|recognis|honour|neighbour|colour": "American spelling",
}


def project_files(pattern="*"):
    """Files that git tracks or would track, so that caches and virtual environments do not count."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout: which files belong to the project is not known")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", pattern], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return sorted(path for path in listed.stdout.split("\n") if path and (ROOT / path).exists())


@cache
def tree_of(path):
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def imports_of(path):
    """Names of imported modules."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def room_of(path):
    return path.split("/")[0].removesuffix(".py")


def test_imports_go_one_way():
    files = [path for path in project_files("*.py") if room_of(path) in ROOMS]
    assert len(files) > 20
    for path in files:
        room = ROOMS.index(room_of(path))
        for name in imports_of(path):
            top = name.split(".")[0]
            assert top not in ENTRY_POINTS, f"{path} imports {name}, which is above all rooms"
            assert top not in ROOMS or ROOMS.index(top) <= room, f"{path} imports {name}: an arrow back"
            assert top not in ("transformers", "openai", "lm_eval"), (
                f"{path} imports {name}, a tool of tests and scripts"
            )


def test_kernels_import_only_torch_and_each_other():
    """Torch and each other; what compiles and opens the C kernels may use the standard library too."""
    for path in project_files("kernels/*.py"):
        assert {name.split(".")[0] for name in imports_of(path)} <= {"torch", "kernels", *sys.stdlib_module_names}


def test_the_environment_is_read_in_settings_alone():
    for path in project_files("*.py"):
        if path == "settings.py" or path.startswith("tests/"):
            continue
        assert not re.search(r"\bos\.(environ|getenv)\b", (ROOT / path).read_text(encoding="utf-8")), path


def test_files_stay_readable():
    for path in project_files("*.py"):
        text = (ROOT / path).read_text(encoding="utf-8")
        assert text.count("\n") <= MAX_LINES, f"{path} is too long: split it by stage"
        if text.strip():
            assert ast.get_docstring(tree_of(path)), f"{path} does not say what it is"


def test_product_files_are_short():
    paths = [path for path in project_files() if room_of(path) in PRODUCT and path.endswith(house_table.SUFFIXES)]
    lengths = {path: (ROOT / path).read_text(encoding="utf-8").count("\n") for path in paths}
    assert {path: n for path, n in lengths.items() if n > MAX_PRODUCT_LINES and path not in LONGER} == {}


def test_first_lines_name_the_thing():
    for path in house_table.files():
        assert not re.match(r"(What|Whether|Who)\b", house_table.first_sentence(path)), path


def test_product_code_uses_the_terms_of_the_field():
    for path in project_files():
        if room_of(path) in PRODUCT and path.endswith(house_table.SUFFIXES):
            text = (ROOT / path).read_text(encoding="utf-8")
            for word, instead in PRIVATE_WORDS.items():
                found = re.search(word, text, re.IGNORECASE)
                assert not found, f"{path} says {found[0]!r}; say {instead}"


def test_no_two_classes_share_a_name():
    places = {}
    for path in project_files("*.py"):
        if not path.startswith("tests/"):
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def documented_variables():
    """-> (names of the headings, {name: what to use instead, or None} of the table) of docs/env_vars.md."""
    text = (ROOT / "docs" / "env_vars.md").read_text(encoding="utf-8")
    built = re.findall(r"^### `(\w+)`", text, re.MULTILINE)
    rows = re.findall(r"^\| ((?:`\w+` ?)+)\| (?:use `([^`]+)`|ignored|not built yet) \|", text, re.MULTILINE)
    table = {name: instead or None for names, instead in rows for name in re.findall(r"\w+", names)}
    return built, table


def test_the_page_of_variables_equals_settings():
    built, table = documented_variables()
    assert built == list(VARIABLES)
    assert table == {name: RENAMED.get(name) for name in IGNORED}


def test_every_variable_is_really_read():
    from settings import Environ, Settings

    asked = set()

    class Recording(dict):
        def get(self, name, *default):
            asked.add(name)
            return super().get(name, *default)

        def __contains__(self, name):
            asked.add(name)
            return False

    Settings.read([], Recording())
    assert asked == {*VARIABLES, *IGNORED}
    assert Environ({}).notices == []


def test_the_table_of_models_is_that_of_the_tests():
    assert DOCUMENT.read_text(encoding="utf-8") == table(), "run python dev/model_table.py"


def test_the_list_of_files_is_that_of_their_first_lines():
    assert house_table.DOCUMENT.read_text(encoding="utf-8") == house_table.table(), "run python dev/house_table.py"


def test_every_folder_has_a_purpose():
    folders = {str(Path(path).parent).removeprefix(".") for path in house_table.files()}
    assert {folder for folder in folders if not folder.startswith("tests/")} <= {*house_table.FOLDERS}


def test_the_readme_is_short_and_names_every_folder():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_README_LINES
    assert [folder for folder in house_table.FOLDERS if f"{folder.split('/')[0]}/" not in text] == []


def test_links_between_documents_lead_somewhere():
    for path in project_files("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / path).read_text(encoding="utf-8")):
            assert ((ROOT / path).parent / target).exists(), f"{path} links to {target}"


def test_the_python_example_of_the_usage_page_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "usage.md").read_text(encoding="utf-8"), re.DOTALL)
    engine = next(block for block in blocks if "load_model" in block)
    names = {}
    exec(engine.replace('"models/tiny"', repr(str(ROOT / "models" / "tiny"))), names)
    assert [len(ids) for ids in names["sequences"]] == [3 + 32] * 4
