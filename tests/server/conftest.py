"""The HTTP server of a test module: a process on models/tiny, whose log must hold no error at the end."""

import pytest

from tests.support.server_process import CONTEXT, SINGLE_THREAD, ServerProcess


@pytest.fixture(scope="module")
def server():
    server = ServerProcess(CTX=CONTEXT, **SINGLE_THREAD)
    yield server
    assert server.stop() == 0
    assert not [line for line in server.lines if "Error" in line or "Traceback" in line]
