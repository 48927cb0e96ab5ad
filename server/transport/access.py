"""The door: who may come in, and one line for each request that does or does not.

A page in a browser must not reach the server behind its user's back: it may have any name point here (so `Host` is
checked), and may send requests without reading the answers (so `Origin` is).
"""

import hmac
import ipaddress
import secrets
import time
from urllib.parse import urlsplit

from starlette.responses import JSONResponse

from errors import printable, shorten
from server.openai.api_error import ApiError

GONE = 499  # how proxies note a client that went away before its answer
OPEN_PATHS = ("/health",)
KNOWN_PATHS = (
    "/health /metrics /v1/models /v1/chat/completions /v1/completions /tokenize /detokenize".split()
)  # for metrics: other names are the client's


class AccessControl:
    """api_key: None lets everybody in. hosts: names that are allowed beside addresses and localhost; * is any."""

    def __init__(self, api_key=None, hosts=()):
        self.api_key = None if api_key is None else api_key.encode()
        self.hosts = {host.lower() for host in hosts}

    def check(self, scope):
        """ApiError for whoever may not come in."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if not self.allows(f"//{headers.get('host', '')}"):
            raise ApiError(403, f"Host {headers.get('host')!r} is not allowed here (ALLOWED_HOSTS)", code="host")
        if "origin" in headers and not self.allows(headers["origin"]):
            raise ApiError(403, f"Origin {headers['origin']!r} is not allowed here (ALLOWED_HOSTS)", code="origin")
        if self.api_key is None or scope["path"] in OPEN_PATHS:
            return
        kind, _, key = headers.get("authorization", "").partition(" ")
        # compare_digest takes the same time wherever two keys differ.
        if kind.lower() != "bearer" or not hmac.compare_digest(key.strip().encode("latin-1"), self.api_key):
            what = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, "a key is needed: Authorization: Bearer ...", code="invalid_api_key", headers=what)

    def allows(self, url):
        try:
            name = (urlsplit(url).hostname or "").lower()
        except ValueError:
            return False
        return "*" in self.hosts or name in self.hosts or name == "localhost" or is_address(name)


def is_address(name):
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class AccessMiddleware:
    """Wraps the application. Every request gets an id, and a line on stderr when it is over."""

    def __init__(self, app, service, guard):
        self.app, self.service, self.guard = app, service, guard

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id, began, status = f"req-{secrets.token_hex(8)}", time.perf_counter(), None

        async def send_on(message):
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            self.guard.check(scope)
            await self.app(scope, receive, send_on)
        except ApiError as error:
            await JSONResponse(error.body, error.status, error.headers)(scope, receive, send_on)
        except Exception as error:  # the application has answered already
            self.service.say(f"[http] {request_id} {type(error).__name__}: {error}")
        finally:
            self.note(scope, request_id, status, time.perf_counter() - began)

    def note(self, scope, request_id, status, seconds):
        path = scope["path"] if scope["path"] in KNOWN_PATHS else "other"
        status = str(status or GONE)
        self.service.metrics.requests.labels(path, status).inc()
        client = scope["client"][0] if scope.get("client") else "-"
        parts = [client, scope["method"], shorten(printable(scope["path"])), status, f"{seconds:.3f} s"]
        self.service.say("[http] " + " ".join([*parts, scope.get("colibri.note", ""), request_id]).replace("  ", " "))
