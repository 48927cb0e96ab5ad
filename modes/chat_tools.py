"""Tools of a chat (--tools): the model writes an expression or a program between markers, and its result is forced.

    <|python_start|>17 * 23<|python_end|><|output_start|>391<|output_end|>

These are the markers of nanochat. A block that the calculator knows is calculated; any other runs as a program, and the
result is what it prints. The program is limited, not isolated: see generate/tools/sandbox.py.
"""

from errors import Refused, shorten
from generate.tools.calculator import calculate
from generate.tools.sandbox import execute_code
from generate.tools.tool_state import Tool
from text.answer_tags import PYTHON_TAGS as MARKERS
from text.tokenizer import TextTokenizer

MAX_OUTPUT = 2000  # characters that the model gets
NOTICE = "[chat] tools: calculator and python; programs of the model run on this machine, limited but not isolated"


def make_tool(tokenizer: TextTokenizer) -> Tool:
    """The python tool. Refused for a tokenizer without its markers."""
    missing = [marker for marker in MARKERS if not tokenizer.find_ids([marker])]
    if missing:
        raise Refused(f"--tools: {tokenizer.path} lacks {' '.join(missing)}; only models trained with them call tools")
    start, end, output_start, output_end = tokenizer.find_ids(MARKERS)

    def run(code: str) -> str | None:
        # Special tokens in the output stay text, also when the conversation is encoded again.
        return tokenizer.break_special(run_block(code), " ")

    return Tool(start, end, output_start, output_end, run)


def run_block(code: str) -> str | None:
    """-> the value of an expression, what a program prints, or its error; None where it prints nothing."""
    value = calculate(code)
    if value is not None:
        return str(value)
    result = execute_code(code)
    output = result.stdout.rstrip("\n") if result.success else f"{result.stdout}{result.error}"
    return shorten(output, MAX_OUTPUT) or None
