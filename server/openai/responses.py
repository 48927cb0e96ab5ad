"""Response builders: the choices of a generation as JSON of the OpenAI API, whole or chunk by chunk."""

import secrets
import time
from dataclasses import replace
from typing import Any

from generate.request import Prefilled
from server.generation import Generation
from server.openai.api_error import JsonObject
from server.openai.choice_stream import ChoiceDelta
from server.openai.completion_request import CompletionPrompt
from server.openai.logprobs import LogprobFormatter, TokenLogprob


class ResponseBuilder:
    """start_chunks() -> chunks; add_update(number, update) -> chunks; response() -> all of them as one object."""

    kind = chunk_kind = id_prefix = ""

    def __init__(self, generation: Generation):
        self.generation = generation
        self.with_logprobs = generation.params.request.top_logprobs is not None
        self.formatter = LogprobFormatter(generation.service.tokenizer)
        self.id = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.logprobs: list[list[TokenLogprob]] = [[] for _ in generation.choices]

    def start_chunks(self) -> list[JsonObject]:
        return []

    def add_update(self, number: int, update: ChoiceDelta | Prefilled) -> list[JsonObject]:
        """Add an update of choice `number`, or of prompt `number` when it is prefilled."""
        raise NotImplementedError

    def choice(self, number: int) -> JsonObject:
        raise NotImplementedError

    def chunk(self, *choices: JsonObject, **more: Any) -> JsonObject:
        model_id = self.generation.service.model_id
        header = {"id": self.id, "object": self.chunk_kind, "created": self.created, "model": model_id}
        return header | {"choices": list(choices)} | more

    def response(self) -> JsonObject:
        choices = map(self.choice, range(len(self.generation.choices)))
        return self.chunk(*choices, object=self.kind, usage=self.generation.usage())


class ChatResponseBuilder(ResponseBuilder):
    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def start_chunks(self) -> list[JsonObject]:
        numbers = range(len(self.generation.choices))
        self.texts = [{"reasoning": "", "content": ""} for _ in numbers]
        self.calls: list[list[JsonObject]] = [[] for _ in numbers]
        return [self.chunk(self.chunk_choice(number, {"role": "assistant", "content": ""})) for number in numbers]

    def chunk_choice(self, number: int, delta: JsonObject) -> JsonObject:
        return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}

    def add_update(self, number: int, update: ChoiceDelta | Prefilled) -> list[JsonObject]:
        assert isinstance(update, ChoiceDelta)
        self.logprobs[number] += update.logprobs
        deltas = [self.add_segment(number, kind, text) for kind, text in update.segments]
        if update.finish_reason or (update.logprobs and not deltas):
            deltas.append({})
        choices = [self.chunk_choice(number, delta) for delta in deltas]
        if update.logprobs:
            choices[0]["logprobs"] = {"content": self.formatter.chat_logprobs(update.logprobs)}
        choices[-1]["finish_reason"] = update.finish_reason
        return [self.chunk(choice) for choice in choices]

    def add_segment(self, number: int, kind: str, text: str) -> JsonObject:
        """Return the delta of a segment."""
        calls = self.calls[number]
        if kind == "call":
            call = {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
            calls.append(call | {"function": {"name": text, "arguments": ""}})
            return {"tool_calls": [{"index": len(calls) - 1} | call | {"function": {"name": text, "arguments": ""}}]}
        if kind == "arguments":
            calls[-1]["function"]["arguments"] += text
            return {"tool_calls": [{"index": len(calls) - 1, "function": {"arguments": text}}]}
        self.texts[number][kind] += text
        return {"reasoning_content" if kind == "reasoning" else "content": text}

    def choice(self, number: int) -> JsonObject:
        texts = self.texts[number]
        calls = self.calls[number]
        content = texts["content"] or (None if calls else "")
        message: JsonObject = {"role": "assistant", "content": content, "refusal": None}
        if texts["reasoning"]:
            message["reasoning_content"] = texts["reasoning"]
        if calls:
            message["tool_calls"] = calls
        content_logprobs = self.formatter.chat_logprobs(self.logprobs[number])
        return {
            "index": number,
            "message": message,
            "logprobs": {"content": content_logprobs, "refusal": None} if self.with_logprobs else None,
            "finish_reason": self.generation.choices[number].finish_reason,
        }


class CompletionResponseBuilder(ResponseBuilder):
    """echoed: the prompts, where they are echoed in front of their answers."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, generation: Generation, echoed: list[CompletionPrompt] | None):
        super().__init__(generation)
        self.echoed = echoed
        self.n = generation.n
        self.texts = [""] * len(generation.choices)

    def start_chunks(self) -> list[JsonObject]:
        if not self.echoed or self.with_logprobs:
            return []  # a prompt with log-probabilities is echoed when it is prefilled
        return [chunk for prompt in range(len(self.echoed)) for chunk in self.add_prompt(prompt, None)]

    def add_update(self, number: int, update: ChoiceDelta | Prefilled) -> list[JsonObject]:
        if isinstance(update, Prefilled):
            return self.add_prompt(number, update.prompt_logprobs)
        text = "".join(text for _, text in update.segments)
        shift = len(self.echoed[number // self.n].text) if self.echoed else 0
        logprobs = [replace(entry, text_offset=entry.text_offset + shift) for entry in update.logprobs]
        return [self.text_chunk(number, text, logprobs, update.finish_reason)]

    def add_prompt(self, prompt: int, prompt_logprobs: list[Any] | None) -> list[JsonObject]:
        """Echo a prompt in each of its choices."""
        assert self.echoed
        echoed = self.echoed[prompt]
        logprobs = self.echoed_logprobs(echoed, prompt_logprobs) if prompt_logprobs else []
        numbers = range(prompt * self.n, (prompt + 1) * self.n)
        return [self.text_chunk(number, echoed.text, logprobs) for number in numbers]

    def echoed_logprobs(self, echoed: CompletionPrompt, prompt_logprobs: list[Any]) -> list[TokenLogprob]:
        """The family's prefix has entries at offset 0, and no place in the text."""
        offsets = self.formatter.text_offsets([token for token, _, _ in prompt_logprobs])
        hidden = offsets[echoed.num_prefix] if echoed.num_prefix < len(offsets) else 0
        return [
            TokenLogprob(token, logprob, top, max(0, offset - hidden))
            for (token, logprob, top), offset in zip(prompt_logprobs, offsets, strict=True)
        ]

    def text_chunk(self, number: int, text: str, logprobs: list[TokenLogprob], reason: str | None = None) -> JsonObject:
        self.texts[number] += text
        self.logprobs[number] += logprobs
        entries = self.formatter.completion_logprobs(logprobs) if logprobs else None
        return self.chunk({"text": text, "index": number, "logprobs": entries, "finish_reason": reason})

    def choice(self, number: int) -> JsonObject:
        return {
            "text": self.texts[number],
            "index": number,
            "logprobs": self.formatter.completion_logprobs(self.logprobs[number]) if self.with_logprobs else None,
            "finish_reason": self.generation.choices[number].finish_reason,
        }
