"""Answers in the JSON of the OpenAI API: whole, or chunk by chunk. Both are put together from the same deltas."""

import secrets
import time

from server.openai.answer import LogprobFormatter, TokenLogprob


class ResponseBuilder:
    """One request's answers. `generation` is set when it has begun."""

    kind = chunk_kind = prefix = ""

    def __init__(self, service, with_logprobs):
        self.service, self.with_logprobs = service, with_logprobs
        self.tokens, self.generation = LogprobFormatter(service.tokenizer), None
        self.id, self.created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())

    def head(self, kind):
        return {"id": self.id, "object": kind, "created": self.created, "model": self.service.model_id}

    def chunk(self, choice):
        return self.head(self.chunk_kind) | {"choices": [choice]}

    def usage_chunk(self):
        return self.head(self.chunk_kind) | {"choices": [], "usage": self.generation.usage()}

    def whole(self):
        choices = [self.choice(number) for number in range(len(self.generation.answers))]
        return self.head(self.kind) | {"choices": choices, "usage": self.generation.usage()}


class ChatResponseBuilder(ResponseBuilder):
    """begin() -> chunks; add(number, delta) -> chunks; choice(number) -> all of them as one."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def begin(self):
        self.calls = [[] for _ in self.generation.answers]
        self.texts = [{"reasoning": "", "content": ""} for _ in self.generation.answers]
        self.entries = [[] for _ in self.generation.answers]
        return [
            self.chunk(self.piece(number, {"role": "assistant", "content": ""}))
            for number in range(len(self.generation.answers))
        ]

    def piece(self, number, delta, entries=(), finish_reason=None):
        logprobs = {"content": [self.tokens.chat(entry) for entry in entries]} if entries else None
        return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def add(self, number, delta):
        """Remember a Delta -> its chunks."""
        self.entries[number] += delta.entries
        steps = [self.remember(number, kind, text) for kind, text in delta.pieces]
        if not steps and (delta.entries or delta.finish_reason):
            steps = [{}]
        chunks = [self.piece(number, step) for step in steps]
        if delta.entries and self.with_logprobs:
            chunks[0] = self.piece(number, steps[0], delta.entries)
        if delta.finish_reason:
            if steps[-1]:
                chunks.append(self.piece(number, {}))
            chunks[-1]["finish_reason"] = delta.finish_reason
        return [self.chunk(chunk) for chunk in chunks]

    def remember(self, number, kind, text):
        """-> the delta that a client gets."""
        calls = self.calls[number]
        if kind == "call":
            call = {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
            calls.append(call | {"function": {"name": text, "arguments": ""}})
            function = {"name": text, "arguments": ""}
            return {"tool_calls": [{"index": len(calls) - 1} | call | {"function": function}]}
        if kind == "arguments":
            calls[-1]["function"]["arguments"] += text
            return {"tool_calls": [{"index": len(calls) - 1, "function": {"arguments": text}}]}
        self.texts[number][kind] += text
        return {"reasoning_content" if kind == "reasoning" else "content": text}

    def choice(self, number):
        texts, calls = self.texts[number], self.calls[number]
        message = {"role": "assistant", "content": texts["content"] or (None if calls else ""), "refusal": None}
        if texts["reasoning"]:
            message["reasoning_content"] = texts["reasoning"]
        if calls:
            message["tool_calls"] = calls
        logprobs = {"content": [self.tokens.chat(entry) for entry in self.entries[number]], "refusal": None}
        return {
            "index": number,
            "message": message,
            "logprobs": logprobs if self.with_logprobs else None,
            "finish_reason": self.generation.answers[number].finish_reason,
        }


class CompletionResponseBuilder(ResponseBuilder):
    """The same for the legacy endpoint. echoed: the Prompts that go before their answers, or None."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, service, with_logprobs, echoed, num_samples):
        super().__init__(service, with_logprobs)
        self.echoed, self.num_samples = echoed, num_samples

    def begin(self):
        num = len(self.generation.answers)
        self.texts, self.entries = [""] * num, [[] for _ in range(num)]
        if not self.echoed or self.with_logprobs:
            return []  # the prompt waits for its log-probabilities
        return [chunk for prompt in range(len(self.echoed)) for chunk in self.add_prompt(prompt, None)]

    def add_prompt(self, prompt, logprobs):
        """A prompt is read in -> the chunks that echo it."""
        echoed = self.echoed[prompt]
        entries = self.prompt_entries(echoed, logprobs) if logprobs else []
        numbers = range(prompt * self.num_samples, (prompt + 1) * self.num_samples)
        return [chunk for number in numbers for chunk in self.give(number, echoed.text, entries)]

    def prompt_entries(self, echoed, logprobs):
        """What nobody wrote stands at the beginning of the text, and has no width there."""
        offsets = self.tokens.offsets([token for token, _, _ in logprobs])
        hidden = offsets[echoed.num_prefix] if echoed.num_prefix < len(offsets) else 0
        return [
            TokenLogprob(token, logprob, top, max(0, offset - hidden))
            for (token, logprob, top), offset in zip(logprobs, offsets, strict=True)
        ]

    def add(self, number, delta):
        text = "".join(text for _, text in delta.pieces)
        shift = len(self.echoed[number // self.num_samples].text) if self.echoed else 0
        entries = [TokenLogprob(entry.id, entry.logprob, entry.top, entry.offset + shift) for entry in delta.entries]
        return self.give(number, text, entries, delta.finish_reason)

    def give(self, number, text, entries, finish_reason=None):
        self.texts[number] += text
        self.entries[number] += entries
        logprobs = self.tokens.legacy(entries) if self.with_logprobs and entries else None
        return [
            self.chunk({"text": text, "index": number, "logprobs": logprobs, "finish_reason": finish_reason}),
        ]

    def choice(self, number):
        return {
            "text": self.texts[number],
            "index": number,
            "logprobs": self.tokens.legacy(self.entries[number]) if self.with_logprobs else None,
            "finish_reason": self.generation.answers[number].finish_reason,
        }
