"""A server as a user runs it: a process of its own, its address, its log lines, its threads and files."""

import json
import os
import re
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.support.forked import environment, forker, start_colibri

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# On two shared cores one thread is faster than two that wait for each other.
SINGLE_THREAD = {"THREADS": 1}
CONTEXT = 512  # CTX of most servers here


def wait_for(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.05)


class HttpClient:
    """HTTP requests to a server at self.url, which listens at self.port."""

    def post(self, path, body, headers=None):
        """-> (status, JSON, headers). body: bytes, or an object that becomes JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"} | (headers or {}))
        return self.send(request)

    def get(self, path, headers=None):
        return self.send(urllib.request.Request(self.url + path, headers=headers or {}))

    def send(self, request):
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                data, status, headers = response.read(), response.status, response.headers
        except urllib.error.HTTPError as error:
            with error:
                data, status, headers = error.read(), error.code, error.headers
        is_json = headers.get_content_type() == "application/json"
        return status, json.loads(data) if is_json else data.decode(), headers

    def stream(self, path, body):
        """Return the chunks of a stream, after a check that [DONE] is its last event."""
        status, text, _ = self.post(path, body | {"stream": True})
        assert status == 200, text
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]

    def connect(self):
        """Return a connection to send raw bytes."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)


class ServerProcess(HttpClient):
    """SERVE=1 python colibri.py with these variables on a free port; the constructor waits until it listens."""

    def __init__(self, *arguments, **variables):
        environ = {"USAGE": "0", "SERVE": "1", "PORT": "0"} | {name: str(value) for name, value in variables.items()}
        start = start_colibri if "LC_ALL" in variables else forker().start
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = start(list(map(str, arguments)), environment(environ), **pipes)
        self.lines, self.ready = [], threading.Event()
        self.reader = threading.Thread(target=self.read_stderr, daemon=True)
        self.reader.start()
        assert self.ready.wait(60), self.lines
        found = [re.search(r"on (http://\S+)/v1", line) for line in self.lines]
        self.url = next((match[1] for match in found if match), None)
        assert self.url, self.lines
        self.port = int(self.url.rpartition(":")[2])

    def read_stderr(self):
        for line in self.process.stderr:
            self.lines.append(line.decode())
            if b"[serve] " in line:
                self.ready.set()
        self.ready.set()

    def stop(self, signal_number=15, seconds=20):
        """Send a signal, and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
        code = self.process.wait(seconds)
        self.reader.join()
        self.process.stdout.close()
        self.process.stderr.close()
        return code

    # --- resources ---

    def wait_until_idle(self, seconds=10):
        """Wait until no request runs; it must not take long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            health = self.get("/health")[1]
            if health["slots_free"] == health["slots"] and health["queue"] == 0:
                return
            time.sleep(0.05)
        raise AssertionError(f"still busy: {health}")

    @property
    def num_files(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def status(self, name):
        """Return a number of /proc/pid/status: Threads, or VmRSS in kB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)[1])


def chat(server, content="Who art thou?", **fields):
    status, body, _ = server.post(
        CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": 12, "temperature": 0} | fields
    )
    assert status == 200, body
    return body["choices"][0]["message"]["content"]


def complete(server, prompt="In the beginning", **fields):
    status, body, _ = server.post(COMPLETIONS, {"prompt": prompt, "temperature": 0} | fields)
    assert status == 200, body
    return body
