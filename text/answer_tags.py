"""Tags that structure an answer: reasoning, tool calls, channels. Some tokenizers declare them as special tokens."""

from text.harmony import CHANNEL, ENDS, MESSAGE
from text.reply import THINK, THINK_END
from text.tool_calls import CALL_END, CALL_START, KEY, KEY_END, VALUE, VALUE_END

PYTHON_TAGS = ("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>")  # of nanochat
TAGS = {THINK, THINK_END, CALL_START, CALL_END, KEY, KEY_END, VALUE, VALUE_END, *PYTHON_TAGS}
# Other tokenizers have an <|end|>, which says nothing about the structure.
HARMONY_TAGS = {CHANNEL, MESSAGE, *ENDS}


def hidden_tokens(special: set[str], stop_strings: tuple[str, ...] = ()) -> set[str]:
    """The special tokens that an answer is shown without: all but tags, which its reader needs, and those in a stop
    string, which would not be found."""
    shown = TAGS | HARMONY_TAGS if {CHANNEL, MESSAGE} <= special else TAGS
    return {token for token in special - shown if not any(token in stop for stop in stop_strings)}
