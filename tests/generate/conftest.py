"""Fixtures of the sandbox tests."""

import tempfile

import pytest

from generate.tools.sandbox import missing_wall


@pytest.fixture
def walls():
    """For tests of a wall: skipped where none can be built."""
    missing = missing_wall()
    if missing is not None:
        pytest.skip(f"no walls here: {missing}")


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder in which the temporary folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder
