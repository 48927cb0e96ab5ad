"""How answers travel: server-sent events, or one JSON object; and what happens when the client goes away."""

import asyncio
import json

from starlette.responses import JSONResponse, Response

from server.openai.api_error import ApiError


class ClientDisconnected(Exception):
    """The client went away; there is nobody to answer."""


class DisconnectWatch:
    """While it lasts, a client that goes away ends the generation."""

    def __init__(self, receive, generation):
        self.receive, self.generation, self.task = receive, generation, None

    async def wait(self):
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.generation.abandon()

    async def __aenter__(self):
        self.task = asyncio.create_task(self.wait())

    async def __aexit__(self, *error):
        self.task.cancel()
        self.generation.abandon()  # what is over does not notice


async def whole_answer(request, shape, start):
    """-> one JSON object with all answers. start() -> Generation."""
    generation = shape.generation = start()
    async with DisconnectWatch(request.receive, generation):
        shape.begin()
        while not generation.is_over:
            for item in await generation.next(generation.service.keep_alive) or ():
                chunks_of(shape, item)
        if generation.is_abandoned:
            raise ClientDisconnected
    note(request, generation)
    return JSONResponse(shape.whole())


def chunks_of(shape, item):
    """A piece of news of a Generation -> chunks of the answer."""
    kind, number, news = item
    return shape.add(number, news) if kind == "choice" else shape.add_prompt(number, news)


def note(request, generation):
    """For the access line."""
    usage = generation.usage()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    request.scope["colibri.note"] = f"{usage['prompt_tokens']} ({cached} cached) + {usage['completion_tokens']} tokens"


class EventStream(Response):
    """Chunks as server-sent events. A comment goes out when nothing else has for a while, so that nobody on the way
    takes a long prefill for a dead connection."""

    media_type = "text/event-stream"

    def __init__(self, request, shape, generation, with_usage):
        self.request, self.shape, self.generation, self.with_usage = request, shape, generation, with_usage
        self.status_code, self.background, self.body = 200, None, b""
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.raw_headers[[name for name, _ in self.raw_headers].index(b"content-length")]

    async def __call__(self, scope, receive, send):
        async with DisconnectWatch(receive, self.generation):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await self.send_chunks(send, self.shape.begin())
                while not self.generation.is_over:
                    items = await self.generation.next(self.generation.service.keep_alive)
                    if items is not None:
                        await self.send_chunks(send, [c for item in items for c in chunks_of(self.shape, item)])
                    elif not self.generation.is_over:
                        what = "reading the prompt" if self.generation.is_started else "waiting in the queue"
                        await self.send_bytes(send, f": {what}\n\n".encode())
                if self.with_usage and not self.generation.is_abandoned:
                    await self.send_bytes(send, event(self.shape.usage_chunk()))
            except ApiError as error:
                await self.send_bytes(send, event(error.body))
            note(self.request, self.generation)
            await self.send_bytes(send, b"data: [DONE]\n\n", more_body=False)

    async def send_chunks(self, send, chunks):
        if self.with_usage:
            chunks = [chunk | {"usage": None} for chunk in chunks]
        if chunks:
            await self.send_bytes(send, b"".join(map(event, chunks)))

    async def send_bytes(self, send, data, more_body=True):
        await send({"type": "http.response.body", "body": data, "more_body": more_body})


def event(value):
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode("utf-8", "replace")
