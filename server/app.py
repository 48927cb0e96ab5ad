"""The HTTP routes: read a request, submit it to the scheduler, return its response."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from errors import Refused
from server.generation import Generation
from server.http_service import HttpService
from server.metrics import CONTENT_TYPE
from server.openai.api_error import ApiError, internal_error
from server.openai.chat_request import read_chat_prompt, read_chat_request, without_folder
from server.openai.completion_request import read_completion_request
from server.openai.request_fields import RequestFields, parse_object
from server.openai.responses import ChatResponseBuilder, CompletionResponseBuilder, ResponseBuilder
from server.transport.access_control import CLIENT_CLOSED_REQUEST, NOTICES, AccessControl, AccessMiddleware
from server.transport.event_stream import EventStream, json_response
from server.transport.request_body import read_body
from text.reply import ReplyParser

T = TypeVar("T")


def make_app(service: HttpService, access: AccessControl) -> ASGIApp:
    routes = Routes(service)
    app = Starlette(
        routes=[
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/v1/chat/completions", routes.chat_completions, methods=["POST"]),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/detokenize", routes.detokenize, methods=["POST"]),
        ],
        exception_handlers={
            ApiError: on_api_error,
            HTTPException: on_http_exception,
            ClientDisconnect: on_disconnect,
            Exception: on_fault,
        },
    )
    app.router.redirect_slashes = False  # AccessMiddleware removes them: a POST that is redirected loses its body
    return AccessMiddleware(app, service, access)


async def on_api_error(request: Request, error: Any) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


async def on_http_exception(request: Request, error: Any) -> Response:
    """Answer what the routing refuses: an unknown path, a wrong method."""
    return await on_api_error(request, ApiError(error.status_code, error.detail, headers=error.headers))


async def on_disconnect(request: Request, error: Exception) -> Response:
    """Set the status of the log line; nobody reads the response."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def on_fault(request: Request, error: Exception) -> Response:
    """Answer after a fault of the server, which goes on. AccessMiddleware logs the fault."""
    return await on_api_error(request, internal_error())


async def respond(request: Request, builder: ResponseBuilder) -> ASGIApp:
    return EventStream(builder) if builder.generation.params.is_stream else await json_response(request, builder)


@dataclass
class Routes:
    service: HttpService

    async def read_request(self, request: Request, read: Callable[[RequestFields, HttpService], T]) -> T:
        """Return what `read` makes of the fields of the body. It runs in the tokenizer's thread."""
        data = await read_body(request)

        def parse_and_read() -> T:
            fields = RequestFields(parse_object(data))
            self.service.check_model(fields)
            try:
                return read(fields, self.service)
            except Refused as error:  # a text that the tokenizer or the model cannot take
                raise ApiError(400, without_folder(error, self.service)) from None
            except RecursionError:
                raise ApiError(400, "the body is nested too deeply") from None
            finally:
                request.scope[NOTICES] = fields.notices

        return await asyncio.get_running_loop().run_in_executor(self.service.worker, parse_and_read)

    async def chat_completions(self, request: Request) -> ASGIApp:
        ids, make_parser, params = await self.read_request(request, read_chat_request)
        generation = Generation(self.service, [ids], params, make_parser)
        return await respond(request, ChatResponseBuilder(generation))

    async def completions(self, request: Request) -> ASGIApp:
        prompts, params, echo = await self.read_request(request, read_completion_request)
        generation = Generation(self.service, [prompt.ids for prompt in prompts], params, ReplyParser)
        return await respond(request, CompletionResponseBuilder(generation, prompts if echo else None))

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self.service.model_entry()]})

    async def model(self, request: Request) -> Response:
        self.service.check_model(RequestFields({"model": request.path_params["name"]}))
        return JSONResponse(self.service.model_entry())

    async def health(self, request: Request) -> Response:
        statistics = self.service.scheduler.statistics()
        status = "closing" if self.service.is_closing else "ok"
        body = {"status": status, "model": self.service.model_id}
        body |= {name: statistics[name] for name in ("slots", "slots_free", "queue")}
        return JSONResponse(body, 200 if status == "ok" else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.service.metrics.registry), headers={"Content-Type": CONTENT_TYPE})

    async def tokenize(self, request: Request) -> Response:
        ids, with_texts = await self.read_request(request, read_tokenize_request)
        body = {"count": len(ids), "max_model_len": self.service.context, "tokens": ids}
        if with_texts:
            body["token_strs"] = [self.service.tokenizer.token_bytes(i, i).decode("utf-8", "replace") for i in ids]
        return JSONResponse(body)

    async def detokenize(self, request: Request) -> Response:
        return JSONResponse({"prompt": await self.read_request(request, read_detokenize_request)})


def read_tokenize_request(fields: RequestFields, service: HttpService) -> tuple[list[int], bool]:
    """Tokenize a prompt, or messages as of a chat -> (ids, whether the text of each is wanted)."""
    with_texts = fields.flag("return_token_strs", False)
    if "messages" in fields.values:
        ids, _ = read_chat_prompt(fields, service)
    else:
        ids = service.tokenizer.encode(fields.text("prompt"))
        if fields.flag("add_special_tokens", True):
            ids = service.prefix.prepend(ids)
    fields.refuse_unread()
    return ids, with_texts


def read_detokenize_request(fields: RequestFields, service: HttpService) -> str:
    ids = fields.wholes("tokens", [], 0, service.vocab_size - 1)
    fields.refuse_unread()
    return service.tokenizer.decode(ids)
