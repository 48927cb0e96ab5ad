"""ReasoningControl: how a chat template turns reasoning on and off, and the efforts it knows, found by rendering it.

Templates differ: some read enable_thinking, others thinking; some know two values of reasoning_effort and take every
other word for the greatest, or print any word into the prompt. A wish becomes the template's own values here.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from text.harmony import is_harmony
from text.reply import THINK, THINK_END

SWITCHES = ("enable_thinking", "thinking")  # variables that turn reasoning on and off
EFFORT = "reasoning_effort"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # of clients, from the least to the greatest
OFF_WORDS = ("none", "no_think")
# The efforts of a template that prints any word: those that models are trained on.
PRINTED_EFFORTS = ("low", "medium", "high")
UNKNOWN = "effort-unknown-to-all"
Variables = dict[str, Any]
Probe = Callable[[Variables], str | None]  # variables -> the prompt of a short conversation; None: the template fails


def reasoning_state(text: str, source: str) -> str:
    """Return whether the answer to a prompt begins with reasoning, as of ReplyParser: open, maybe or off."""
    end = text.rstrip()
    if end.endswith(THINK):
        return "open"
    return "maybe" if THINK_END in source and not end.endswith(THINK_END) else "off"


@dataclass(frozen=True)
class ReasoningControl:
    """switches: the variables that turn reasoning on and off; off_word: the effort that turns it off; default_effort:
    the effort that turns it on where it is off by default; always: without any of these, whether the model reasons
    (None: not known)."""

    probe: Probe
    switches: tuple[str, ...] = ()
    efforts: tuple[str, ...] = ()  # the template's own, from the least to the greatest, without none
    off_word: str | None = None
    default_effort: str | None = None
    always: bool | None = None

    @property
    def has_switch(self) -> bool:
        return bool(self.switches or self.off_word)

    @property
    def can_reason(self) -> bool:
        return bool(self.has_switch or self.efforts) or self.always is not False

    @property
    def can_stop(self) -> bool:
        return self.has_switch or self.always is not True

    def variables(self, think: bool, effort: str | None = None) -> Variables:
        """Return the template's variables for an answer with or without reasoning, and an effort of its own."""
        word = (effort or self.default_effort) if think else self.off_word
        return {SWITCHES[0]: think, **dict.fromkeys(self.switches, think)} | ({EFFORT: word} if word else {})

    def nearest(self, effort: str) -> str | None:
        """Return the template's own effort nearest to a word of EFFORTS, the greater one of two; None if it has none.
        Of other words only those that the template tells from an unknown one are its own."""
        if effort in EFFORTS:
            rank = EFFORTS.index(effort)
            distances = {own: abs(EFFORTS.index(own) - rank) for own in reversed(self.efforts)}
            return min(distances, key=distances.__getitem__, default=None)
        on = dict.fromkeys(self.switches, True)
        text, unknown = (self.probe(on | {EFFORT: word}) for word in (effort, UNKNOWN))
        is_printed = unknown is not None and UNKNOWN in unknown.lower()
        return effort if text not in (None, unknown) and not is_printed else None


def find_reasoning_control(
    probe: Probe, source: str, names: Collection[str], literals: Collection[str]
) -> ReasoningControl:
    """names: variables that the template reads. literals: the texts that it is written with."""
    pairs = {name: (probe({name: True}), probe({name: False})) for name in SWITCHES if name in names}
    switches = tuple(name for name, (on, off) in pairs.items() if None not in (on, off) and on != off)
    on = dict.fromkeys(switches, True)
    known = find_efforts(lambda word: probe(on | {EFFORT: word}), literals) if EFFORT in names else []
    off_word = next((word for word in known if word in OFF_WORDS), None)
    efforts = tuple(word for word in known if word not in OFF_WORDS)
    control = ReasoningControl(probe, switches, efforts, off_word)
    plain = probe({}) or ""
    if switches:
        return control
    if off_word:
        is_off = plain == probe({EFFORT: off_word})
        return ReasoningControl(probe, (), efforts, off_word, control.nearest("medium") if is_off else None)
    state = "open" if is_harmony(source) else reasoning_state(plain, source)
    return ReasoningControl(probe, (), efforts, always={"open": True, "off": False}.get(state))


def find_efforts(render: Callable[[str], str | None], literals: Collection[str]) -> list[str]:
    """Return the efforts that a template knows: it tells them from an unknown word, or prints them."""
    unknown = render(UNKNOWN)
    texts = {word: text for word in dict.fromkeys((*OFF_WORDS, *EFFORTS)) if (text := render(word)) is not None}
    if unknown is None:  # the template fails for other words
        return list(texts) if len({*texts.values()}) > 1 else []
    if UNKNOWN in unknown.lower():
        return [word for word in texts if word in PRINTED_EFFORTS or word in literals]
    known = [word for word, text in texts.items() if text != unknown]
    if not known:
        return []
    # The rest has one text: that of a word which the template names, or else of one that is not among the known.
    rest = [word for word in texts if word not in known]
    known += [word for word in rest if word in literals] or [w for w in ("medium", "high", "low") if w in rest][:1]
    return [word for word in texts if word in known]
