"""The socket, and uvicorn with patience that ends: for requests that never end, and for clients that never read."""

import asyncio
import ipaddress
import logging
import socket

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from errors import Refused

HEAD_SECONDS = 30  # for the head of a request, from its first byte or from the connection on
STUCK_SECONDS = 120  # that a client may leave unread what it was sent
GRACE_SECONDS = 5
BACKLOG = 128


def open_socket(host, port, has_key):
    """-> (a socket that is bound, its address as a URL). Refused for an address that others reach while there is no
    key, and for one that cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise Refused(f"HOST={host}: no such address ({error.strerror}); 127.0.0.1 is this machine alone") from None
    if not ipaddress.ip_address(address[0].partition("%")[0]).is_loopback and not has_key:
        raise Refused(
            f"HOST={host} can be reached by others: set API_KEY to what clients must send, or leave HOST unset"
        )
    sock = socket.socket(family)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise Refused(f"HOST={host}, PORT={port}: cannot listen there ({error.strerror})") from None
    address, port = sock.getsockname()[:2]
    return sock, f"http://{f'[{address}]' if ':' in address else address}:{port}"


class TimeoutProtocol(H11Protocol):
    """Ends connections on which nothing can come to an end: a request whose head stays incomplete, a client that does
    not read."""

    head_timer = stuck_timer = None

    def connection_made(self, transport):
        super().connection_made(transport)
        self.watch_head()

    def data_received(self, data):
        super().data_received(data)
        self.watch_head()

    def watch_head(self):
        """The clock runs while no request is being answered, and is not wound up by its single bytes."""
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.head_timer is None:
            self.head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)
        elif not is_idle:
            self.head_timer = stop(self.head_timer)

    def pause_writing(self):
        super().pause_writing()
        self.stuck_timer = stop(self.stuck_timer) or self.loop.call_later(STUCK_SECONDS, self.transport.abort)

    def resume_writing(self):
        super().resume_writing()
        self.stuck_timer = stop(self.stuck_timer)

    def connection_lost(self, exc):
        self.head_timer, self.stuck_timer = stop(self.head_timer), stop(self.stuck_timer)
        super().connection_lost(exc)


def stop(timer):
    if timer:
        timer.cancel()


class HttpServer(uvicorn.Server):
    """close(): called, in a thread, once no new connections are taken; it ends what is under way."""

    def __init__(self, app, close, on_start):
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
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
        )
        self.close, self.on_start = close, on_start
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # we say ourselves what there is to say

    async def startup(self, sockets=None):
        await super().startup(sockets)
        self.on_start()

    async def shutdown(self, sockets=None):
        for server in self.servers:
            server.close()
        await asyncio.to_thread(self.close)
        await super().shutdown(sockets)
