"""Tools of a chat (--tools): the model writes an expression or a program between markers, and its result is forced.

    <|python_start|>17 * 23<|python_end|><|output_start|>391<|output_end|>

These are the markers of nanochat. A block that the calculator knows is calculated; any other runs as a program, and the
result is what it prints. Programs run behind the walls of docs/sandbox.md, or not at all.
"""

from functools import partial

from errors import Refused, shorten
from generate.tools.calculator import calculate
from generate.tools.sandbox import describe_walls, execute_code
from generate.tools.tool_state import Tool
from text.answer_tags import PYTHON_TAGS as MARKERS
from text.tokenizer import TextTokenizer

MAX_OUTPUT = 2000  # characters that the model gets


def tools_notice(unsafe: bool) -> str:
    return f"[chat] tools: calculator and python; {describe_walls(unsafe)}"


def make_tool(tokenizer: TextTokenizer, unsafe: bool = False) -> Tool:
    """The python tool. Refused for a tokenizer without its markers. `unsafe`: programs run without walls too."""
    missing = [marker for marker in MARKERS if not tokenizer.find_ids([marker])]
    if missing:
        raise Refused(f"--tools: {tokenizer.path} lacks {' '.join(missing)}; only models trained with them call tools")
    start, end, output_start, output_end = tokenizer.find_ids(MARKERS)

    return Tool(start, end, output_start, output_end, partial(run_block, unsafe=unsafe))


class ToolTexts:
    """The tokenizer of blocks and outputs: special tokens in what a program prints stay text."""

    def __init__(self, tokenizer: TextTokenizer):
        self.decode, self.encode = tokenizer.decode, tokenizer.encode_as_text


def run_block(code: str, unsafe: bool = False) -> str | None:
    """-> the value of an expression, what a program prints, or its error; None where it prints nothing."""
    value = calculate(code)
    if value is not None:
        return str(value)
    try:
        result = execute_code(code, unsafe=unsafe)
    except Refused as error:
        return str(error)
    output = result.stdout.rstrip("\n") if result.success else f"{result.stdout}{result.error}"
    return shorten(output, MAX_OUTPUT) or None
