"""The routes: what is asked for is read, handed to the scheduler, and answered."""

import asyncio

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from server.generation import Generation
from server.metrics import CONTENT_TYPE
from server.openai.answer import ChoiceStream, PlainParser
from server.openai.api_error import ApiError
from server.openai.chat import read_chat, read_turn
from server.openai.completions import read_completion
from server.openai.fields import RequestFields, check_text, parse_object
from server.openai.shapes import ChatResponseBuilder, CompletionResponseBuilder
from server.transport.access import GONE, AccessMiddleware
from server.transport.body import read_body
from server.transport.event_stream import ClientDisconnected, EventStream, whole_answer


def make_app(service, guard):
    """-> the ASGI application. guard: who may come in."""
    routes = Routes(service)
    app = Starlette(
        routes=[
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/detokenize", routes.detokenize, methods=["POST"]),
        ],
        exception_handlers={
            ApiError: refuse,
            HTTPException: refuse_http,
            ClientDisconnect: nobody,
            ClientDisconnected: nobody,
            Exception: fail,
        },
    )
    return AccessMiddleware(app, service, guard)


async def refuse(request, error):
    return JSONResponse(error.body, error.status, error.headers)


async def refuse_http(request, error):
    """What the routing itself refuses: an unknown path, a wrong method."""
    return await refuse(request, ApiError(error.status_code, error.detail, headers=error.headers))


async def nobody(request, error):
    """The client went away; what nobody reads is noted as proxies note it."""
    return Response(status_code=GONE)


async def fail(request, error):
    """A fault of ours: the server lives on. The door says what it was."""
    return await refuse(request, ApiError(500, "internal error", code="internal_error"))


class Routes:
    def __init__(self, service):
        self.service = service

    async def read(self, request, reader, needs_model=True):
        """The body of a request -> what `reader` makes of its fields; in the worker's thread."""
        data = await read_body(request)

        def work():
            fields = RequestFields(parse_object(data))
            if needs_model:
                self.service.check_model(fields)
            try:
                return reader(fields, self.service)
            except RecursionError:
                raise ApiError(400, "the body is nested too deeply") from None

        return await asyncio.get_running_loop().run_in_executor(self.service.worker, work)

    async def answer(self, request, shape, sampling, start):
        """start() -> Generation: begins, or refuses before anything is sent."""
        if sampling.is_stream:
            shape.generation = start()
            return EventStream(request, shape, shape.generation, sampling.with_usage)
        return await whole_answer(request, shape, start)

    async def chat(self, request):
        asked = await self.read(request, read_chat)
        sampling = asked.sampling

        def make_answer(number):
            return ChoiceStream(self.service.tokenizer, sampling.stops, asked.make_reader())

        def start():
            return Generation(self.service, [asked.prompt_ids], sampling, make_answer)

        return await self.answer(request, ChatResponseBuilder(self.service, asked.with_logprobs), sampling, start)

    async def completions(self, request):
        asked = await self.read(request, read_completion)
        sampling = asked.sampling
        with_logprobs = sampling.top_logprobs is not None

        def make_answer(number):
            return ChoiceStream(self.service.tokenizer, sampling.stops, PlainParser())

        def start():
            ids = [prompt.ids for prompt in asked.prompts]
            return Generation(self.service, ids, sampling, make_answer, asked.echo and with_logprobs)

        shape = CompletionResponseBuilder(
            self.service, with_logprobs, asked.prompts if asked.echo else None, sampling.n
        )
        return await self.answer(request, shape, sampling, start)

    async def models(self, request):
        return JSONResponse({"object": "list", "data": [self.service.model()]})

    async def model(self, request):
        self.service.check_model(RequestFields({"model": request.path_params["name"]}))
        return JSONResponse(self.service.model())

    async def health(self, request):
        numbers = self.service.scheduler.numbers()
        status = "closing" if self.service.is_closing else "ok"
        names = ("slots", "slots_free", "queue")
        body = {"status": status, "model": self.service.model_id} | {name: numbers[name] for name in names}
        return JSONResponse(body, 200 if status == "ok" else 503)

    async def metrics(self, request):
        return Response(self.service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def tokenize(self, request):
        ids, with_texts = await self.read(request, read_tokenize)
        body = {"count": len(ids), "max_model_len": self.service.context, "tokens": ids}
        if with_texts:
            body["token_strs"] = [self.service.tokenizer.decode([i]) for i in ids]
        return JSONResponse(body)

    async def detokenize(self, request):
        return JSONResponse({"prompt": await self.read(request, read_detokenize)})


def read_tokenize(fields, service):
    """A prompt, or messages as of a chat -> (ids, whether each one's text is wanted)."""
    with_texts = fields.flag("return_token_strs", False)
    if "messages" in fields.values:
        ids = read_turn(fields, service).ids
    else:
        text = fields.take("prompt")
        check_text(text, "prompt")
        ids = service.tokenizer.encode(text)
        if fields.flag("add_special_tokens", True):
            ids = service.prefix.prepend(ids)
    fields.end()
    return ids, with_texts


def read_detokenize(fields, service):
    """Ids -> their text."""
    ids = fields.items("tokens")
    if not all(type(i) is int and 0 <= i < service.vocab_size for i in ids):
        raise fields.bad("tokens", f"expected token ids from 0 to {service.vocab_size - 1}")
    fields.end()
    return service.tokenizer.decode(ids)
