"""SERVE: answers over HTTP, or over stdin and stdout, until it is told to end."""

import sys

from errors import Refused
from generate.kv_file import KvFileStore
from generate.scheduler import Scheduler
from load.model import load_model, open_snapshot
from machine.console import say
from text.tokenizer import TextTokenizer

DEFAULT_SLOTS = 4
KV_SHARE = 0.25  # of what the resident part leaves of the budget: the rest is for experts


def open_server(settings):
    """As open_snapshot, with KV_SLOTS KV caches; by default with 4, or as many as leave most memory to experts."""
    if settings.serve == "1":
        import server.app  # noqa: F401 - what it takes belongs to the process that the plan counts
    if settings.kv_slots:
        return open_snapshot(settings, settings.kv_slots)
    for num_slots in range(DEFAULT_SLOTS, 1, -1):
        try:
            opened = open_snapshot(settings, num_slots)
        except Refused:
            continue  # what has nothing to do with memory is refused again with one slot
        plan = opened.plan
        if plan.kv_bytes <= KV_SHARE * (plan.budget_bytes - plan.fixed_bytes + plan.kv_bytes):
            return opened
        opened.close()
    return open_snapshot(settings, 1)


def run_serve(settings, opened):
    """Load, listen, and answer -> exit code 0: to be told to end is how a server ends."""
    if settings.serve == "stdio":
        return run_stdio(settings, opened)
    from server.transport.listen import open_socket

    tokenizer = TextTokenizer(opened.folder, opened.config)
    # Before the weights are read: an address that cannot be had is a mistake to hear of at once.
    sock, url = open_socket(settings.host, settings.port, settings.api_key is not None)
    with sock:
        loaded, scheduler = start(settings, opened)
        try:
            run_http(settings, loaded, scheduler, tokenizer, sock, url)
        except KeyboardInterrupt:
            pass  # uvicorn raises the signal again that ended it
        finally:
            end(loaded, scheduler)
    say("[serve] ended")
    return 0


def run_http(settings, loaded, scheduler, tokenizer, sock, url):
    from server.app import make_app
    from server.metrics import Metrics
    from server.service import Service
    from server.transport.access import AccessControl
    from server.transport.listen import HttpServer

    try:
        tokenizer.template  # noqa: B018 - compiled here, so that a broken one is known before a request
    except Refused as error:
        say(f"[serve] chats are refused: {error}")
    metrics = Metrics(loaded.model)
    metrics.scheduler = scheduler
    service = Service(settings, loaded, scheduler, tokenizer, metrics, say)
    if service.prefix.notice:
        say(service.prefix.notice)
    app = make_app(service, AccessControl(settings.api_key, settings.allowed_hosts))

    def announce():
        say(
            f"[serve] {service.model_id} on {url}/v1 | {service.num_slots} conversations at once, {settings.queue} wait"
        )

    def close():
        service.is_closing = True
        scheduler.close()

    with service:
        HttpServer(app, close, announce).run(sockets=[sock])


def run_stdio(settings, opened):
    from server.stdio.pipe import run

    loaded, scheduler = start(settings, opened)
    try:
        return run(loaded, scheduler, sys.stdin.buffer, sys.stdout.buffer, settings)
    except KeyboardInterrupt:
        return 0
    finally:
        end(loaded, scheduler)


def start(settings, opened):
    """-> (Loaded, Scheduler)."""
    loaded = load_model(settings, opened)
    for line in (loaded.kernels, loaded.drive, loaded.history):
        if line:
            say(line)
    saved = KvFileStore(loaded, settings.cache, say) if settings.kvsave else None
    return loaded, Scheduler(loaded, opened.plan.kv_slots, settings.queue, saved)


def end(loaded, scheduler):
    scheduler.close()
    if loaded.usage:
        numbers = scheduler.numbers()
        loaded.usage.save(loaded.model.experts.counts(), numbers["prompt_rows"] + numbers["tokens"])
