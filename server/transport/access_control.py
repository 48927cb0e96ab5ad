"""Access control: who may send requests, and one line on stderr for each request.

A page in a browser must not reach the server behind its user's back: its name may point to this machine (so `Host` is
checked), and it may send requests without reading the answers (so `Origin` is).
"""

import hmac
import ipaddress
import json
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from errors import printable, shorten
from server.http_service import HttpService
from server.openai.api_error import ApiError

CLIENT_CLOSED_REQUEST = 499  # status that proxies log for a client that disconnected before its answer
USAGE_NOTE = "colibri.usage"  # key of the scope: the token counts for the log line
NOTICES = "colibri.notices"  # key of the scope: texts for the header Warning, about fields without their full effect
# For metrics; other names are the client's own.
KNOWN_PATHS = "/health /metrics /v1/models /v1/chat/completions /v1/completions /tokenize /detokenize".split()


class AccessControl:
    """api_key: None lets everybody in. hosts: names that are allowed beside addresses and localhost; * is any."""

    def __init__(self, api_key: str | None = None, hosts: Iterable[str] = ()):
        self.api_key = None if api_key is None else api_key.encode()
        self.hosts = {"localhost", *(host.lower() for host in hosts)}

    def check_access(self, scope: Scope) -> None:
        """ApiError for a request that is not allowed."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        for name, url in (("host", f"//{host}"), ("origin", headers.get("origin", f"//{host}"))):
            if not self.allows_url(url):
                message = f"{name.title()} {headers.get(name)!r} is not allowed; add it to the server's ALLOWED_HOSTS"
                raise ApiError(403, message, code=name)
        if self.api_key is None or scope["path"] == "/health":
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # compare_digest takes the same time wherever two keys differ.
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode("latin-1"), self.api_key):
            message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def allows_url(self, url: str) -> bool:
        """Return whether the URL names an allowed host, or an address."""
        try:
            name = urlsplit(url).hostname or ""
            if self.hosts.isdisjoint(("*", name)):
                ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


@dataclass
class AccessMiddleware:
    """Checks each request, gives it an id, counts it, and logs it when it is over."""

    app: ASGIApp
    service: HttpService
    access: AccessControl

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Clients join a base URL and a path with one slash too many, or end the path with one.
        scope["path"] = re.sub("/+", "/", scope["path"]).rstrip("/") or "/"
        request_id = f"req-{secrets.token_hex(8)}"
        start_time = time.perf_counter()
        status = CLIENT_CLOSED_REQUEST

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [(b"x-request-id", request_id.encode())]
                headers += [(b"warning", warning_header(notice)) for notice in scope.get(NOTICES, ())]
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        try:
            self.access.check_access(scope)
            await self.app(scope, receive, send_with_id)
        except ApiError as error:
            await JSONResponse(error.body, error.status, error.headers)(scope, receive, send_with_id)
        except Exception as error:  # the application has answered already
            self.service.say(f"[http] {request_id} {type(error).__name__}: {error}")
        finally:
            self.log_request(scope, request_id, str(status), time.perf_counter() - start_time)

    def log_request(self, scope: Scope, request_id: str, status: str, seconds: float) -> None:
        path = scope["path"] if scope["path"] in KNOWN_PATHS else "other"
        self.service.metrics.requests.labels(path, status).inc()
        for notice in scope.get(NOTICES, ()):
            self.service.say(f"[http] {request_id} {printable(shorten(notice))}")
        client = scope["client"][0] if scope.get("client") else "-"
        path = shorten(printable(scope["path"]))
        words = ["[http]", client, scope["method"], path, status, f"{seconds:.3f} s", scope.get(USAGE_NOTE), request_id]
        self.service.say(" ".join(word for word in words if word))


def warning_header(text: str) -> bytes:
    """Return the value of a header Warning: a code, an agent and a quoted text of ASCII alone."""
    return f"299 colibri.py {json.dumps(printable(shorten(text, 500)))}".encode()
