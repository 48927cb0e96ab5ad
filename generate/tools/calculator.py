"""calculate: evaluate a small expression that a model wrote. Nothing in the text is ever executed."""

import ast
import math
import operator
import re
from collections.abc import Callable

MAX_CHARACTERS = 10_000  # of the text
MAX_STEPS = 200  # operators and opening parentheses outside strings; bounds the depth of the tree
MAX_INTEGER = 10**300  # of literals and of every value on the way; floats end near there too

ARITHMETIC = re.compile(r"[-0-9+*/.() ]*")
STRING = r"""'[A-Za-z0-9"().,_ ]*'|"[A-Za-z0-9'().,_ ]*\""""
COUNTING = re.compile(rf"(?:{STRING}|[() ]|\.(?:count|upper|lower)\()*")
STEP = re.compile(rf"{STRING}|([-+*/(])")
COMMA = re.compile(rf"({STRING})|,")
# nanochat declines a text with one of these, also inside a string; declined here too, for the same tokens.
DECLINED_WORDS = (
    "__ import exec eval compile open file input raw_input globals locals vars dir getattr setattr delattr hasattr"
).split()

BINARY: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
UNARY: dict[type, Callable] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
CASES: dict[str, Callable[[str], str]] = {"upper": str.upper, "lower": str.lower}


class Declined(ValueError):
    """The text is not of the language, or a value is too large."""


def calculate(text: str) -> int | float | None:
    """-> the value, or None where the text is declined. Never raises on a str; callable from any thread.

    The language, after use_calculator of karpathy/nanochat (engine.py), is one of

    - arithmetic of decimal numbers with + - * / // and parentheses, Python's values and precedence
    - a string counted in another: 'strawberry'.count('r'), each string with any number of .upper() and .lower().
      Strings hold ASCII letters, digits, spaces and the other quote or ( ) . , _ and none of DECLINED_WORDS.

    Commas outside strings are dropped: 1,000*3.

    A division by zero, an integer of more than 300 digits, a float that overflows, more than 10,000 characters or 200
    steps give None. The text is parsed, and the tree walked: where nanochat evaluates whatever its characters allow
    (other methods of str, an empty tuple, ...), this gives None.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    try:
        text = COMMA.sub(r"\1", text)
        if ARITHMETIC.fullmatch(text):
            return evaluate_number(parse(text))
        return evaluate_count(parse(text)) if is_counting(text) else None
    # RecursionError and MemoryError come from the parser, or from a caller that is already deep.
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def is_counting(text: str) -> bool:
    """True if the text is made of strings, parentheses and the three methods alone. So ast.parse sees no keyword, no
    prefix of a string and no number, and prints no warning about them."""
    lower = text.lower()
    return COUNTING.fullmatch(text) is not None and not any(word in lower for word in DECLINED_WORDS)


def parse(text: str) -> ast.expr:
    """text -> the tree of one expression."""
    if sum(1 for step in STEP.finditer(text) if step[1]) > MAX_STEPS:
        raise Declined
    return ast.parse(text.strip(), mode="eval").body


def evaluate_number(node: ast.expr) -> int | float:
    """Evaluate a tree of arithmetic."""
    match node:
        case ast.Constant(value=int() | float() as value):
            pass
        case ast.UnaryOp(op=op, operand=operand) if type(op) in UNARY:
            value = UNARY[type(op)](evaluate_number(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            value = BINARY[type(op)](evaluate_number(left), evaluate_number(right))
        case _:
            raise Declined
    fits = abs(value) < MAX_INTEGER if isinstance(value, int) else math.isfinite(value)
    if not fits:
        raise Declined
    return value


def evaluate_count(node: ast.expr) -> int:
    """Evaluate string.count(string)."""
    match node:
        case ast.Call(func=ast.Attribute(value=text, attr="count"), args=[part], keywords=[]):
            return evaluate_string(text).count(evaluate_string(part))
    raise Declined


def evaluate_string(node: ast.expr) -> str:
    """Evaluate a string with any number of .upper() and .lower() behind it."""
    match node:
        case ast.Constant(value=str() as value):
            return value
        case ast.Call(func=ast.Attribute(value=text, attr=case), args=[], keywords=[]) if case in CASES:
            return CASES[case](evaluate_string(text))
    raise Declined
