"""A fixture of the hostile tests: a copy of a small model."""

import pytest

from tests.support.hostile import ORIGINAL, copy_files


@pytest.fixture
def folder(tmp_path):
    """A small model, shared by the examples of a property: each restores what it changed."""
    return copy_files(ORIGINAL, ("config.json", "model.safetensors"), tmp_path / "snapshot")
