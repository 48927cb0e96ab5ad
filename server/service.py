"""Service: what requests over HTTP and stdio need of the loaded model, and the server's defaults."""

from collections.abc import Callable, Sequence
from typing import Any

from generate.request import Request
from generate.scheduler import Scheduler
from load.model import LoadedModel
from settings import Settings
from text.prompt import PromptPrefix, all_stop_ids, max_answer_tokens
from text.tokenizer import TextTokenizer

Say = Callable[[str], None]


class Service:
    """say: prints a line to stderr."""

    def __init__(
        self, settings: Settings, loaded: LoadedModel, scheduler: Scheduler, tokenizer: TextTokenizer, say: Say
    ):
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.say = say
        self.context: int = scheduler.context
        self.num_slots: int = scheduler.statistics()["slots"]
        self.stop_ids = all_stop_ids(loaded.config, tokenizer)
        self.prefix = PromptPrefix(loaded.config, tokenizer, settings.prefix)
        self.temperature: float = settings.temp
        self.top_p: float = settings.nucleus
        self.seed: int = settings.seed
        self.think: bool = settings.think
        self.max_tokens: int | None = settings.ngen if settings.ngen < 1 << 31 else None
        if self.prefix.notice:
            say(self.prefix.notice)

    def make_request(
        self, ids: Sequence[int], max_tokens: int | None, temperature: float, top_p: float, seed: int, **options: Any
    ) -> Request:
        """Return the engine's Request, of at most as many tokens as have room behind the prompt."""
        room = max_answer_tokens(len(ids), self.context)
        return Request(
            tuple(ids),
            max_tokens=room if max_tokens is None else min(max_tokens, room),
            temperature=float(temperature),
            nucleus=float(top_p),
            seed=seed % 2**64,
            stop_ids=self.stop_ids,
            **options,
        )
