"""Fork server for tests: runs colibri.py in a process of its own without importing torch each time.

The server starts once, imports the modules of a run, and forks for each run. The fork calls `main` of colibri.py or of
another script with its arguments, environment, folder and files, as `python colibri.py` has them. What
depends on how an interpreter starts and ends (locale, size, what is still buffered) needs a real process.
"""

import atexit
import fcntl
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import traceback
from contextlib import suppress
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STREAMS = ("stdin", "stdout", "stderr")
CLOSED = "closed"  # a stream as `2>&-` leaves it


def environment(variables):
    """HOME and PATH alone; everything else the test must set."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return kept | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"} | variables


def start_colibri(arguments, environ, cwd=ROOT, **streams):
    """`python colibri.py` by an interpreter of its own -> Popen."""
    command = [sys.executable, str(ROOT / "colibri.py"), *arguments]
    streams = dict.fromkeys(STREAMS, subprocess.DEVNULL) | streams
    return subprocess.Popen(command, env=environ, cwd=cwd, **streams)


class ForkedProcess:
    """A fork of the server, with the interface of subprocess.Popen."""

    def __init__(self, control, streams, request):
        theirs, ours = [], {}
        for name in STREAMS:
            stream = streams.get(name)
            if stream == subprocess.PIPE:
                reading, writing = os.pipe()
                is_input = name == "stdin"
                theirs.append(reading if is_input else writing)
                ours[name] = os.fdopen(writing if is_input else reading, "wb" if is_input else "rb")
            elif stream in (None, CLOSED, subprocess.DEVNULL):
                theirs.append(os.open(os.devnull, os.O_RDWR))
            else:
                theirs.append(os.dup(stream if isinstance(stream, int) else stream.fileno()))
        self.stdin, self.stdout, self.stderr = (ours.get(name) for name in STREAMS)
        request["closed"] = [number for number, name in enumerate(STREAMS) if streams.get(name) == CLOSED]
        self.status, status = os.pipe()  # brings the pid, then the exit code
        socket.send_fds(control, [json.dumps(request).encode()], [*theirs, status])
        for fd in (*theirs, status):
            os.close(fd)
        self.pid, self.returncode, self.args = self.receive(), None, request["arguments"]

    def receive(self):
        data = os.read(self.status, 8)
        assert len(data) == 8, "the fork server is gone"
        return int.from_bytes(data, "little", signed=True)

    def poll(self):
        return self.ended(0)

    def wait(self, timeout=None):
        if self.ended(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def ended(self, timeout):
        """Wait for the end -> the exit code, None after the timeout."""
        if self.returncode is None and select.select([self.status], [], [], timeout)[0]:
            self.returncode = self.receive()
            os.close(self.status)
        return self.returncode

    def communicate(self, input=None, timeout=None):
        """-> (stdout, stderr), each None where it is no pipe."""
        streams, found = [self.stdout, self.stderr], {}
        readers = [
            threading.Thread(target=lambda stream=stream: found.update({stream: stream.read()}), daemon=True)
            for stream in filter(None, streams)
        ]
        for reader in readers:
            reader.start()
        if self.stdin:
            with suppress(BrokenPipeError):
                self.stdin.write(input or b"")
                self.stdin.close()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        for stream in filter(None, streams):
            stream.close()
        return tuple(found.get(stream) for stream in streams)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for stream in filter(None, (self.stdin, self.stdout, self.stderr)):
            stream.close()
        self.wait()


class Forker:
    """Client of the fork server. Close it at the end."""

    def __init__(self):
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        environ = environment({})
        self.process = subprocess.Popen(command, env=environ, cwd=ROOT, pass_fds=[theirs.fileno()])
        theirs.close()

    def start(self, arguments, environ, cwd=ROOT, module="colibri", terminal=None, **streams):
        """-> ForkedProcess. stdin, stdout, stderr as for Popen, where missing /dev/null. terminal: the path of one that
        becomes the controlling terminal and all three."""
        request = dict(arguments=arguments, environ=environ, cwd=str(cwd), module=module, terminal=terminal)
        return ForkedProcess(self.control, streams, request)

    def run(self, arguments, environ, cwd, timeout):
        """-> CompletedProcess with stdout and stderr as bytes."""
        process = self.start(arguments, environ, cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def close(self):
        self.control.close()
        self.process.wait()


@cache
def forker():
    """The Forker of this process."""
    server = Forker()
    atexit.register(server.close)
    return server


# --- the server -------------------------------------------------------------------------------------------------------


def serve(control):
    sys.path.insert(0, str(ROOT))
    for module in "colibri modes.check modes.replay modes.score modes.serve modes.teacher_forcing modes.text".split():
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # `watch` processes are not waited for
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1 << 20, 4)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            watch(fds, json.loads(message))
        for fd in fds:
            os.close(fd)


def watch(fds, request):
    """Fork the run, and report its pid and its exit code. Never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *streams, status = fds
    pid = os.fork()
    if pid == 0:
        os.close(status)
        run_main(streams, **request)
    for fd in streams:
        os.close(fd)
    with suppress(BrokenPipeError):  # the test may be over
        os.write(status, pid.to_bytes(8, "little", signed=True))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(status, code.to_bytes(8, "little", signed=True))
    os._exit(0)


def run_main(streams, arguments, environ, cwd, module, terminal, closed):
    """Run `main` of the module as its script would be run. Never returns."""
    code = 1
    try:
        for fd, stream in enumerate(streams):
            os.dup2(stream, fd)
        os.closerange(3, max(streams) + 1)
        if terminal:
            os.setsid()
            controlling = os.open(terminal, os.O_RDWR)
            fcntl.ioctl(controlling, termios.TIOCSCTTY, 0)
            for fd in range(3):
                os.dup2(controlling, fd)
            os.close(controlling)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environ)
        sys.argv = [f"{module.replace('.', '/')}.py", *arguments]
        # New ones, which know whether the files are terminals.
        sys.stdin, sys.stdout, sys.stderr = (
            open(fd, mode, buffering, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
            for fd, mode, buffering, errors in (
                (0, "r", -1, "surrogateescape"),
                (1, "w", 1 if os.isatty(1) else -1, "surrogateescape"),
                (2, "w", 1, "backslashreplace"),
            )
        )
        for number in closed:
            setattr(sys, STREAMS[number], None)
            os.close(number)
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
        code = importlib.import_module(module).main(arguments)
    except SystemExit as error:  # of argparse
        code = error.code
    except BaseException:  # what the interpreter would do
        traceback.print_exc()
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError:  # as the interpreter does at its end, which itself takes a second with torch
        print("Exception ignored in: <stdout>", file=sys.stderr)
        code = 120
    try:
        if sys.stderr:
            sys.stderr.flush()
    except OSError:
        code = 120
    os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
