"""The arguments of an earlier tool call, as a client sends them back: an object, also where its answer was cut off."""

import json
import re
from contextlib import suppress
from typing import Any

JsonObject = dict[str, Any]
JSON_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*("?)|[][{}]', re.DOTALL)  # texts, the last one perhaps cut off; brackets
CUT_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
# What may be missing in front of the closing brackets: the end of a text or of a key; a value, or its end.
TEXT_ENDINGS = ('"', '":null')
VALUE_ENDINGS = ("", ":null", "null", "0", "rue", "ue", "e", "alse", "lse", "se", "ull", "ll", "l")
MAX_DEPTH = 64  # templates that go through a value need several stack frames for each level
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def read_arguments(text: str) -> JsonObject:
    """Return the object whose JSON text this is, or the start of it: what is missing is completed. Any other text is
    the one argument `arguments`, so that the model sees what it wrote."""
    is_cut_text, closing, depth = scan_brackets(text)
    starts = (text, CUT_ESCAPE.sub("", text) if is_cut_text else text.rstrip().removesuffix(","))
    for start in starts if depth <= MAX_DEPTH else ():
        for ending in TEXT_ENDINGS if is_cut_text else VALUE_ENDINGS:
            # A cut key must not replace the value of one that begins like it.
            hook = keep_first if ending.endswith(":null") else None
            with suppress(ValueError, RecursionError):
                value = json.loads(start + ending + closing, strict=False, object_pairs_hook=hook)
                if isinstance(value, dict | None):
                    return without_lone_surrogates(value or {})
    return {"arguments": text}


def scan_brackets(text: str) -> tuple[bool, str, int]:
    """Return (whether the text ends within a JSON text, the brackets that close it, how deep it is nested)."""
    is_cut_text, closing, depth = False, "", 0
    for token in JSON_TOKENS.finditer(text):
        if token[0] in "{[":
            closing = ("}" if token[0] == "{" else "]") + closing
            depth = max(depth, len(closing))
            if depth > MAX_DEPTH:
                break
        elif token[0] in "}]":
            closing = closing[1:]
        else:
            is_cut_text = not token[1]
    return is_cut_text, closing, depth


def keep_first(pairs: list[tuple[str, Any]]) -> JsonObject:
    return dict(pairs) | dict(reversed(pairs))


def without_lone_surrogates(value: JsonObject) -> JsonObject:
    """Return the value with U+FFFD for halves of surrogate pairs, which UTF-8 cannot hold."""
    text = json.dumps(value, ensure_ascii=False)
    return json.loads(LONE_SURROGATE.sub("\ufffd", text)) if LONE_SURROGATE.search(text) else value
