"""SERVE: answer requests over HTTP, or over stdin and stdout, until the server is told to end."""

import sys
from socket import socket

from errors import Refused
from generate.kv_file import KvFileStore
from generate.scheduler import Scheduler
from load.model import LoadedModel, OpenedSnapshot, load_model, open_snapshot
from machine.console import say
from modes.report import save_usage, say_loaded
from settings import Settings
from text.tokenizer import TextTokenizer

DEFAULT_KV_SLOTS = 4
KV_SHARE = 0.25  # KV caches take at most this share of the budget beyond the dense weights: the rest is for experts


def open_server(settings: Settings) -> OpenedSnapshot:
    """open_snapshot with KV_SLOTS KV caches; by default with 4, or as many as leave most of the memory to experts."""
    if settings.serve == "1":
        import server.app  # noqa: F401 - the plan counts the memory of the process, with the server's modules in it
    if settings.kv_slots:
        return open_snapshot(settings, settings.kv_slots)
    for num_slots in range(DEFAULT_KV_SLOTS, 1, -1):
        try:
            opened = open_snapshot(settings, num_slots)
        except Refused:
            continue  # a reason other than memory comes up again with one slot
        plan = opened.plan
        if plan.kv_bytes <= KV_SHARE * (plan.budget_bytes - plan.fixed_bytes + plan.kv_bytes):
            return opened
        opened.close()
    return open_snapshot(settings, 1)


def run_serve(settings: Settings, opened: OpenedSnapshot) -> int:
    """Load, listen and answer -> 0: a server ends by being told to."""
    if settings.serve == "stdio":
        return run_stdio(settings, opened)
    from server.transport.http_server import open_socket

    tokenizer = TextTokenizer(opened.folder, opened.config)
    # Before the weights are read, which may take minutes: an address in use is refused at once.
    sock, url = open_socket(settings.host, settings.port, settings.api_key is not None)
    with sock:
        loaded, scheduler = start_scheduler(settings, opened)
        try:
            run_http(settings, loaded, scheduler, tokenizer, sock, url)
        except KeyboardInterrupt:
            pass  # uvicorn raises the signal that ended it once more
        finally:
            end_scheduler(loaded, scheduler)
    say("[serve] ended")
    return 0


def run_http(
    settings: Settings,
    loaded: LoadedModel,
    scheduler: Scheduler,
    tokenizer: TextTokenizer,
    sock: socket,
    url: str,
) -> None:
    from server.app import make_app
    from server.http_service import HttpService
    from server.transport.access_control import AccessControl
    from server.transport.http_server import HttpServer

    try:
        tokenizer.template  # noqa: B018 - compiled here, so that a broken one is known before a request
    except Refused as error:
        say(f"[serve] chats are refused: {error}")
    service = HttpService(settings, loaded, scheduler, tokenizer, say)
    app = make_app(service, AccessControl(settings.api_key, settings.allowed_hosts))

    def announce() -> None:
        say(
            f"[serve] {service.model_id} on {url}/v1 | {service.num_slots} conversations at once, {settings.queue} wait"
        )

    def close() -> None:
        service.is_closing = True
        scheduler.close()

    with service:
        HttpServer(app, close, announce).run(sockets=[sock])


def run_stdio(settings: Settings, opened: OpenedSnapshot) -> int:
    from server.stdio.pipe_server import run_pipe_server

    loaded, scheduler = start_scheduler(settings, opened)
    try:
        return run_pipe_server(loaded, scheduler, sys.stdin.buffer, sys.stdout.buffer, settings)
    except KeyboardInterrupt:
        return 0
    finally:
        end_scheduler(loaded, scheduler)


def start_scheduler(settings: Settings, opened: OpenedSnapshot) -> tuple[LoadedModel, Scheduler]:
    loaded = load_model(settings, opened)
    say_loaded(loaded)
    saved = KvFileStore(loaded, settings.cache, say) if settings.kvsave else None
    return loaded, Scheduler(loaded, opened.plan.kv_slots, settings.queue, saved)


def end_scheduler(loaded: LoadedModel, scheduler: Scheduler) -> None:
    scheduler.close()
    numbers = scheduler.statistics()
    save_usage(loaded, numbers["prompt_rows"] + numbers["tokens"])
