"""What every request needs of the loaded model: the scheduler, the tokenizer, the server's own defaults."""

import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from generate.request import Request
from server.openai.api_error import ApiError
from text.prompt import PromptPrefix, all_stop_ids, positions_needed

SEED_STEP = 0x9E3779B97F4A7C15  # odd, so that every request without a seed has one of its own
TEMPERATURE = 0.7
KEEP_ALIVE_SECONDS = 10  # between two signs of life in a stream


class Service:
    """settings: temp, nucleus, seed, ngen, think, prefix, kvsave, as settings.py reads them. say: a line for stderr."""

    keep_alive = KEEP_ALIVE_SECONDS

    def __init__(self, settings, loaded, scheduler, tokenizer, metrics, say):
        self.loaded, self.scheduler, self.tokenizer = loaded, scheduler, tokenizer
        self.metrics, self.say, self.num_slots = metrics, say, scheduler.numbers()["slots"]
        self.submit = scheduler.submit
        self.folder, self.model_id = loaded.folder, Path(os.path.abspath(loaded.folder)).name
        self.context, self.vocab_size = scheduler.context, loaded.config.vocab_size
        self.stop_ids = all_stop_ids(loaded.config, tokenizer)
        self.temperature = TEMPERATURE if settings.temp is None else settings.temp
        self.nucleus, self.seed, self.think = settings.nucleus, settings.seed, settings.think
        self.max_tokens = settings.ngen if settings.ngen < 1 << 31 else None
        self.saves = settings.kvsave
        self.prefix = PromptPrefix(loaded.config, tokenizer, settings.prefix)
        self.created, self.numbers = int(time.time()), itertools.count(1)
        self.is_closing = False
        # Tokenizing may take a while, and one text after the other: the event loop goes on meanwhile.
        self.worker = ThreadPoolExecutor(1, "tokenizer")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.worker.shutdown()

    def check_room(self, ids):
        """The ids, if an answer of at least one token has room."""
        if positions_needed(len(ids), 1) > self.context:
            raise ApiError(
                400,
                f"the prompt has {len(ids)} tokens, the context of this server is {self.context} (CTX)",
                code="context_length_exceeded",
            )
        return ids

    def request(self, ids, sampling, max_tokens, prompt_logprobs):
        """-> the engine's Request."""
        seed = self.seed + next(self.numbers) * SEED_STEP if sampling.seed is None else sampling.seed
        return Request(
            prompt_ids=tuple(ids),
            max_tokens=max_tokens,
            temperature=float(sampling.temperature),
            nucleus=float(sampling.nucleus),
            top_k=sampling.top_k,
            seed=seed % 2**64,
            num_samples=sampling.n,
            stop_ids=self.stop_ids,
            top_logprobs=sampling.top_logprobs,
            prompt_logprobs=prompt_logprobs,
            conversation=sampling.conversation,
        )

    def check_model(self, fields):
        """The field `model`: this one, or left out."""
        name = fields.text("model")
        if name not in (None, self.model_id):
            raise ApiError(404, f"there is no model {name!r} here, but {self.model_id!r}", "model", "model_not_found")

    def model(self):
        """The entry of /v1/models."""
        return {
            "id": self.model_id,
            "object": "model",
            "created": self.created,
            "owned_by": "colibri.py",
            "max_model_len": self.context,
        }
