"""SERVE: answer requests over HTTP, or over stdin and stdout, until the server is told to end."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from errors import Refused
from generate.kv_file import KvFileStore
from generate.scheduler import Scheduler
from load.model import LoadedModel, OpenedSnapshot, load_model, open_snapshot
from machine.console import PrefillProgress, say
from modes.report import RunReport, save_usage
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
        from server.stdio.pipe_server import run_pipe_server

        with running_scheduler(settings, opened) as (loaded, scheduler):
            return run_pipe_server(loaded, scheduler, sys.stdin.buffer, sys.stdout.buffer, settings)
        return 0
    run_http(settings, opened)
    say("[serve] ended")
    return 0


def run_http(settings: Settings, opened: OpenedSnapshot) -> None:
    from server.app import make_app
    from server.http_service import HttpService
    from server.transport.access_control import AccessControl
    from server.transport.http_server import HttpServer, open_socket

    tokenizer = TextTokenizer(opened.folder, opened.config)
    # Before the weights are read, which may take minutes: an address in use is refused at once.
    sock, url = open_socket(settings.host, settings.port, settings.api_key is not None)
    with sock, running_scheduler(settings, opened) as (loaded, scheduler):
        try:
            tokenizer.template  # noqa: B018 - compiled here, so that a broken one is known before a request
        except Refused as error:
            say(f"[serve] chats are refused: {error}")
        service = HttpService(settings, loaded, scheduler, tokenizer, say)
        app = make_app(service, AccessControl(settings.api_key, settings.allowed_hosts))
        num_slots, queue = service.num_slots, settings.queue

        def announce() -> None:
            key = " | clients send API_KEY" if settings.api_key else ""
            say(f"[serve] {service.model_id} on {url}/v1 | {num_slots} conversations at once, {queue} wait{key}")

        def close() -> None:
            service.is_closing = True
            scheduler.close()

        with service.worker:
            HttpServer(app, close, announce).run(sockets=[sock])


@contextmanager
def running_scheduler(settings: Settings, opened: OpenedSnapshot) -> Iterator[tuple[LoadedModel, Scheduler]]:
    """Load the model and start its scheduler, which ends with the block. An interrupt of the block is no error: uvicorn
    raises the signal that ended it once more."""
    loaded = load_model(settings, opened)
    run = RunReport("stdio" if settings.serve == "stdio" else "serve", loaded)
    saved = KvFileStore(loaded, settings.cache, say) if settings.kvsave else None
    progress = PrefillProgress if settings.serve == "stdio" else None  # HTTP serves many at once
    scheduler = Scheduler(loaded, opened.plan.kv_slots, settings.queue, saved, progress=progress)
    try:
        with suppress(KeyboardInterrupt):
            yield loaded, scheduler
    finally:
        scheduler.close()
        numbers = scheduler.statistics()
        save_usage(loaded, numbers["prompt_rows"] + numbers["tokens"])
        run.write_session(settings, scheduler.draft_length, server_numbers(numbers), seed=settings.seed)


def server_numbers(statistics: dict[str, Any]) -> dict[str, Any]:
    """The statistics of a scheduler under the keys of REPORT. Requests share forward passes, in which some prefill and
    others decode, so neither has a time of its own."""
    same = (
        "requests",
        "rows_stop",
        "rows_length",
        "rows_cancelled",
        "rows_error",
        "cached_tokens",
        "tokens",
        "forwards",
    )
    return {name: statistics[name] for name in same} | {
        "prompt_tokens": statistics["prompt_rows"],
        "drafts_proposed": statistics["proposed"],
        "drafts_accepted": statistics["accepted"],
    }
