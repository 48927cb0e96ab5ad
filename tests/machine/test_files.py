"""Atomic file writes: complete or not at all, and what a failure leaves behind."""

import stat

import pytest

from machine.files import atomic_write, save_text


def fail_inside(path, error, **options):
    with pytest.raises(type(error)), atomic_write(path, **options) as file:
        file.write(b"new")
        raise error


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failure_keeps_the_old_file_and_deletes_the_temporary_one(tmp_path, error):
    path = tmp_path / "a.json"
    path.write_text("old")
    fail_inside(path, error)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a.json", "old")]
    with atomic_write(path, sync=True) as file:
        file.write(b"new")
    assert path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_partial_file_is_kept_for_the_next_attempt(tmp_path):
    path, plain = tmp_path / "a.safetensors", tmp_path / "plain"
    fail_inside(path, OSError("disk full"), keep_partial=True)
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors.partial"]
    with atomic_write(path, keep_partial=True) as file:
        file.write(b"n")
    plain.write_text("")
    assert path.read_text() == "n" and path.stat().st_mode == plain.stat().st_mode  # the user's umask
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.safetensors", "plain"]


def test_save_text_makes_the_folder_and_ignores_an_unwritable_one(tmp_path):
    save_text(tmp_path / "cache" / "a", "é")
    assert (tmp_path / "cache" / "a").read_text(encoding="utf-8") == "é"
    (tmp_path / "file").write_text("")
    save_text(tmp_path / "file" / "a", "x")
