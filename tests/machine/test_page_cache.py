"""CachedPages: which pages of a file lie in the page cache."""

import os
import sys

import pytest

from machine import page_cache
from machine.page_cache import CachedPages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mincore tells this on Linux alone")
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@pytest.fixture
def file(tmp_path):
    """A descriptor of 40 pages on a disk, none of them cached."""
    path = tmp_path / "data"
    path.write_bytes(os.urandom(40 * PAGE))
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
    yield descriptor
    os.close(descriptor)


def test_what_was_read_is_cached(file):
    pages = CachedPages(file)
    if pages.share(0, 40 * PAGE) > 0:
        pages.close()
        pytest.skip("a file system in memory")
    assert pages.share(0, 40 * PAGE) == 0  # asking reads nothing
    os.pread(file, 8 * PAGE, 0)
    assert pages.share(0, 8 * PAGE) == pages.share(PAGE + 1, 10) == 1
    assert 0 < pages.share(0, 40 * PAGE) < 1 and pages.share(39 * PAGE, PAGE) == 0
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    assert pages.share(0, 8 * PAGE) == 0
    pages.close()


def test_a_file_of_another_user_is_not_asked(file, monkeypatch):
    """Linux says that all pages of such a file are cached."""
    monkeypatch.setattr(os, "geteuid", lambda: os.fstat(file).st_uid + 1)
    monkeypatch.setattr(page_cache, "can_write", lambda descriptor: False)
    with pytest.raises(OSError, match="not the user's file"):
        CachedPages(file)
