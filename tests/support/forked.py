"""Fork server for tests: runs colibri.py in a process of its own without importing torch each time.

The server starts once, imports the modules of a run, and forks for each run. The fork calls colibri.main with its
arguments, environment, folder and files, as `python colibri.py` has them.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Forker:
    """Client of the fork server. Close it at the end."""

    def __init__(self):
        self.replies, replies = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(replies)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment({}),
            cwd=ROOT,
            pass_fds=[replies],
        )
        os.close(replies)

    def run(self, arguments, environ, cwd, folder, timeout):
        """-> CompletedProcess with stdout and stderr as bytes, which pass through files in `folder`."""
        paths = [folder / "stdout", folder / "stderr"]
        request = dict(arguments=arguments, environ=environ, cwd=str(cwd), files=[str(path) for path in paths])
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        pid = self.reply(timeout)
        try:
            code = self.reply(timeout)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            self.reply(timeout)
            raise subprocess.TimeoutExpired(["colibri.py", *arguments], timeout) from None
        return subprocess.CompletedProcess(arguments, code, *(path.read_bytes() for path in paths))

    def reply(self, timeout):
        with selectors.DefaultSelector() as selector:
            selector.register(self.replies, selectors.EVENT_READ)
            if not selector.select(timeout):
                raise TimeoutError
        return int.from_bytes(os.read(self.replies, 8), "little", signed=True)

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        os.close(self.replies)


def environment(variables):
    """HOME and PATH alone: everything else the test must set."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return kept | {"PYTHONDONTWRITEBYTECODE": "1"} | variables


# --- the server -------------------------------------------------------------------------------------------------------


def serve(replies):
    sys.path.insert(0, str(ROOT))
    import colibri
    import modes.chat
    import modes.check
    import modes.replay
    import modes.score
    import modes.serve
    import modes.teacher_forcing
    import modes.text  # noqa: F401

    def reply(number):
        os.write(replies, number.to_bytes(8, "little", signed=True))

    for line in sys.stdin.buffer:
        pid = os.fork()
        if pid == 0:
            work(colibri.main, replies, **json.loads(line))
        reply(pid)
        reply(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def work(main, replies, arguments, environ, cwd, files):
    """Run colibri.main in the fork; never returns."""
    code = 1
    try:
        os.close(replies)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for fd, path in enumerate(files, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), fd)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environ)
        sys.argv = ["colibri.py", *arguments]
        code = main(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # what the interpreter would do
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
