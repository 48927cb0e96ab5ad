"""The listening socket, and uvicorn with timeouts for requests that stay incomplete and clients that never read."""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from errors import Refused

HEADER_SECONDS = 30  # for the header of a request, from the connection or the answer before it
UNREAD_SECONDS = 120  # that a client may leave unread what it was sent
SHUTDOWN_SECONDS = 5
BACKLOG = 128


def open_socket(host: str, port: int, has_key: bool) -> tuple[socket.socket, str]:
    """Return (a bound socket, its URL). Refused for an address that cannot be used, and for one that other machines
    reach while there is no API key."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise Refused(f"HOST={host}: no such address ({error.strerror}); 127.0.0.1 is this machine alone") from None
    if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback and not has_key:
        raise Refused(f"HOST={host} can be reached by others: set API_KEY, which clients must send, or unset HOST")
    sock = socket.socket(family)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        message = f"HOST={host}, PORT={port}: cannot listen there ({error.strerror}); choose another PORT"
        raise Refused(message) from None
    name, port = sock.getsockname()[:2]
    return sock, f"http://{f'[{name}]' if ':' in name else name}:{port}"


class TimeoutProtocol(H11Protocol):
    """Closes connections on which nothing ends: the header of a request stays incomplete, or the client does not
    read."""

    header_timer: asyncio.TimerHandle | None = None
    unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.update_header_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.update_header_timer()

    def update_header_timer(self) -> None:
        """Run the timer while no request is answered; the bytes of an incomplete header do not restart it."""
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.header_timer is None:
            self.header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.abort)
        elif not is_idle:
            self.header_timer = cancel_timer(self.header_timer)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread_timer = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.unread_timer = cancel_timer(self.unread_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        self.header_timer = cancel_timer(self.header_timer)
        self.unread_timer = cancel_timer(self.unread_timer)
        super().connection_lost(exc)


def cancel_timer(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Return None, the timer that is left."""
    if timer:
        timer.cancel()
    return None


class HttpServer(uvicorn.Server):
    """close: called in a thread once no new connections are accepted; it ends the requests under way."""

    def __init__(self, app: ASGIApp, close: Callable[[], None], on_start: Callable[[], None]):
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=TimeoutProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            )
        )
        self.close = close
        self.on_start = on_start
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # the server prints its own lines

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        await asyncio.to_thread(self.close)
        await super().shutdown(sockets)
