"""Fixtures of the sandbox tests."""

import tempfile
from pathlib import Path

import pytest

from generate.tools import sandbox_child


@pytest.fixture
def without_namespaces(tmp_path, monkeypatch):
    """As on a kernel that allows none."""
    head = "def enter_namespaces() -> bool:\n"
    source = Path(sandbox_child.__file__).read_text(encoding="utf-8")
    assert head in source
    copy = tmp_path / "sandbox_child.py"
    copy.write_text(source.replace(head, f"{head}    return False\n\n\ndef unused():\n"), encoding="utf-8")
    monkeypatch.setattr(sandbox_child, "__file__", str(copy))


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder in which the temporary folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder
