"""Responses of a generation: one JSON object, or server-sent events. A client that disconnects ends the generation."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from server.generation import Generation
from server.openai.api_error import JsonObject
from server.openai.responses import ResponseBuilder
from server.transport.access_control import USAGE_NOTE

EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@asynccontextmanager
async def abort_on_disconnect(receive: Receive, generation: Generation) -> AsyncIterator[None]:
    """Abort the generation when the client disconnects, and at the end."""

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.abort()

    task = asyncio.create_task(wait_for_disconnect())
    try:
        yield
    except ClientDisconnect:
        raise
    except Exception as error:
        raise generation.fail(error) from None
    finally:
        task.cancel()
        generation.abort()


async def json_response(request: Request, builder: ResponseBuilder) -> JSONResponse:
    """Wait for all choices, and return them as one JSON object."""
    generation = builder.generation
    async with abort_on_disconnect(request.receive, generation):
        builder.start_chunks()
        while not generation.is_finished:
            for update in await generation.next_updates(generation.service.keep_alive) or ():
                builder.add_update(*update)
        if generation.is_aborted:
            raise ClientDisconnect
    log_usage(request.scope, generation)
    return JSONResponse(builder.response())


def log_usage(scope: Scope, generation: Generation) -> None:
    """Add the token counts to the log line of the request."""
    usage = generation.usage()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    scope[USAGE_NOTE] = f"{usage['prompt_tokens']} ({cached} cached) + {usage['completion_tokens']} tokens"


@dataclass
class EventStream:
    """Chunks as server-sent events. A comment goes out when nothing else has for a while, so that no proxy takes a
    long prefill for a dead connection."""

    builder: ResponseBuilder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self.builder.generation
        async with abort_on_disconnect(receive, generation):
            await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
            try:
                await self.send_chunks(send, self.builder.start_chunks())
                while not generation.is_finished:
                    updates = await generation.next_updates(generation.service.keep_alive)
                    if updates is not None:
                        chunks = [chunk for update in updates for chunk in self.builder.add_update(*update)]
                        await self.send_chunks(send, chunks)
                    elif not generation.is_finished:
                        comment = "reading the prompt" if generation.is_started else "waiting in the queue"
                        await send_bytes(send, f": {comment}\n\n".encode())
                if generation.params.includes_usage and not generation.is_aborted:
                    await send_bytes(send, to_event(self.builder.chunk(usage=generation.usage())))
            except Exception as error:  # whatever it is: a stream that just stopped would read as a whole answer
                await send_bytes(send, to_event(generation.fail(error).body))
            log_usage(scope, generation)
            await send_bytes(send, b"data: [DONE]\n\n", more_body=False)

    async def send_chunks(self, send: Send, chunks: list[JsonObject]) -> None:
        if self.builder.generation.params.includes_usage:
            chunks = [chunk | {"usage": None} for chunk in chunks]
        if chunks:
            await send_bytes(send, b"".join(map(to_event, chunks)))


async def send_bytes(send: Send, data: bytes, more_body: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more_body})


def to_event(value: JsonObject) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode("utf-8", "replace")
