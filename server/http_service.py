"""HttpService: the state of the HTTP server that its requests share."""

import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from load.model import LoadedModel
from server.metrics import Metrics
from server.openai.api_error import ApiError, JsonObject
from server.openai.request_fields import RequestFields
from server.service import Service
from settings import Settings
from snapshot.folder import snapshot_name

SEED_STEP = 0x9E3779B97F4A7C15  # odd, so that every request without a seed has one of its own


class HttpService(Service):
    keep_alive = 10.0  # seconds between two comments in a stream without events

    def __init__(self, settings: Settings, loaded: LoadedModel, *arguments: Any):
        super().__init__(settings, loaded, *arguments)
        self.metrics = Metrics(loaded.model, self.scheduler)
        self.folder: Path = loaded.folder
        self.model_id = snapshot_name(Path(os.path.abspath(loaded.folder)))
        self.vocab_size: int = loaded.config.vocab_size
        self.created = int(time.time())
        self.request_numbers = itertools.count(1)
        self.is_closing = False
        # Tokenizing may take a while: a thread does it, so that the event loop goes on meanwhile.
        self.worker = ThreadPoolExecutor(1, "tokenizer")

    def next_seed(self) -> int:
        """Return the seed of a request that names none."""
        return self.settings.seed + next(self.request_numbers) * SEED_STEP

    def check_length(self, ids: list[int]) -> None:
        """ApiError unless the context has room for the prompt and one more token."""
        if len(ids) > self.context:
            message = f"the prompt has {len(ids)} tokens, the context of this server {self.context} (CTX); shorten it"
            raise ApiError(400, message, code="context_length_exceeded")

    def check_model(self, fields: RequestFields) -> None:
        name = fields.text("model", None)
        if name not in (None, self.model_id):
            message = f"model: this server has no {name!r}; use {self.model_id!r}"
            raise ApiError(404, message, "model", "model_not_found")

    def model_entry(self) -> JsonObject:
        """Return the entry of /v1/models."""
        return {
            "id": self.model_id,
            "object": "model",
            "created": self.created,
            "owned_by": "colibri.py",
            "max_model_len": self.context,
        }
