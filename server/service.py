"""Service: what requests over HTTP and stdio need of the loaded model."""

from collections.abc import Callable
from dataclasses import replace

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
        self.settings = settings
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.say = say
        self.context: int = scheduler.context
        self.num_slots: int = scheduler.statistics()["slots"]
        self.stop_ids = all_stop_ids(loaded.config, tokenizer)
        self.prefix = PromptPrefix(loaded.config, tokenizer, settings.prefix)
        for notice in self.prefix.notices + tokenizer.thinking_notices(settings.think):
            say(notice)

    def make_request(self, template: Request, ids: list[int], seed: int) -> Request:
        """Return the template with a prompt, and at most as many tokens as have room behind it."""
        max_tokens = min(template.max_tokens, max_answer_tokens(len(ids), self.context))
        stop_ids = self.stop_ids
        return replace(template, prompt_ids=tuple(ids), max_tokens=max_tokens, seed=seed % 2**64, stop_ids=stop_ids)
