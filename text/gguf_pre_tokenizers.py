"""The pre-tokenizers that GGUF files have by name (tokenizer.ggml.pre), as tokenizer.json of their models writes them.

The regular expressions are Oniguruma's. Byte-level BPE merges no pair of bytes across two parts.
"""

from dataclasses import dataclass
from typing import Any

CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
DIGIT, DIGITS = r"\p{N}", r"\p{N}{1,3}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LINES = r"[^\n]+|[\n]+"
IDEOGRAPHS = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
# Of DeepSeek-V2 and older: cased letters of the scripts in these blocks, and other East Asian letters.
CASED_BLOCKS = (
    r"\x{0}-\x{55F}\x{10A0}-\x{10C5}\x{13A0}-\x{13FD}\x{1C90}-\x{2CF3}\x{A640}-\x{A78E}\x{AB70}-\x{ABBF}"
    r"\x{FB00}-\x{FF5A}\x{10400}-\x{104FB}\x{10C80}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}"
)
CASED = rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[{CASED_BLOCKS}]]+"
EAST_ASIAN = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
PUNCTUATION = r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+"


@dataclass(frozen=True)
class PreTokenizer:
    """splits: regular expressions, each applied to the parts of the one before."""

    splits: tuple[str, ...]
    use_regex: bool = False  # GPT-2's own expression behind them
    ignore_merges: bool = False  # a part that is a token is that token, whatever the merges make of it
    is_nfc: bool = False  # composes accents first
    adds_bos: bool = False  # where the file does not say

    def to_json(self) -> dict[str, Any]:
        """pre_tokenizer of tokenizer.json."""
        parts: list[dict[str, Any]] = [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
            for regex in self.splits
        ]
        byte_level = {"add_prefix_space": False, "trim_offsets": False, "use_regex": self.use_regex}
        return {"type": "Sequence", "pretokenizers": [*parts, {"type": "ByteLevel", **byte_level}]}


def cl100k(digits: str, letters: str = r"\p{L}") -> str:
    """Words with one sign in front, numbers, signs, spaces."""
    word = rf"[^\r\n\p{{L}}\p{{N}}]?[{letters}]+"
    return rf"{CONTRACTION}|{word}|{digits}| ?[^\s{letters}\p{{N}}]+[\r\n]*|{SPACES}"


def o200k(end: str, digits: str, upper: str = UPPER, lower: str = LOWER, after: str = r"\r\n/") -> str:
    """As cl100k, but a word ends where capitals follow small letters."""
    sign = r"[^\r\n\p{L}\p{N}]?"
    words = f"{sign}{upper}*{lower}+{end}|{sign}{upper}+{lower}*{end}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[{after}]*|{SPACES}"


def without_han(letters: str) -> str:
    return letters.removesuffix("]") + r"&&[^\p{Han}]]"


DEEPSEEK_V3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}"
)
KIMI = o200k(f"{CONTRACTION}?", DIGITS, without_han(UPPER), without_han(LOWER), r"\r\n")
BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
QWEN2, LLAMA3 = cl100k(DIGIT), cl100k(DIGITS)
GPT2 = PreTokenizer((), use_regex=True)

# Names -> the pre-tokenizer of their models.
TABLE = {
    "qwen2": PreTokenizer((QWEN2,), is_nfc=True),
    "deepseek-r1-qwen megrez hunyuan solar-open grok-2": PreTokenizer((QWEN2,)),
    "qwen35": PreTokenizer((cl100k(DIGIT, r"\p{L}\p{M}"),), is_nfc=True),
    "llama-bpe llama3 llama-v3 falcon3 pixtral lfm2": PreTokenizer((LLAMA3,), ignore_merges=True, adds_bos=True),
    "glm4 glm5": PreTokenizer((LLAMA3,), ignore_merges=True),
    "chatglm-bpe dbrx smaug-bpe": PreTokenizer((LLAMA3,)),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": PreTokenizer((DIGITS, IDEOGRAPHS, DEEPSEEK_V3_WORDS)),
    "deepseek-llm": PreTokenizer((r"[\r\n]", CASED, PUNCTUATION, r"\s+$", EAST_ASIAN, DIGIT)),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", EAST_ASIAN, DIGIT)),
    "gpt-4o": PreTokenizer((o200k(f"{CONTRACTION}?", DIGITS),), ignore_merges=True),
    "llama4 kanana2 minimax-m2": PreTokenizer((o200k(f"{CONTRACTION}?", DIGITS),)),
    "tekken": PreTokenizer((o200k("", DIGIT),), ignore_merges=True, adds_bos=True),
    "kimi-k2": PreTokenizer((rf"[\p{{Han}}]+|{KIMI}",)),
    "olmo": PreTokenizer((), use_regex=True, is_nfc=True),
    "gpt-2 mpt exaone4 jais granite-docling": GPT2,
    "starcoder refact command-r smollm codeshell mellum2": PreTokenizer((DIGIT,), use_regex=True),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer((BAILING,)),
    "laguna": PreTokenizer((LINES, QWEN2)),
}
PRE_TOKENIZERS = {name: pre for names, pre in TABLE.items() for name in names.split()}
