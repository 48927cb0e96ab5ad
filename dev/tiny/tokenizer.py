"""The byte-level BPE tokenizer of models/tiny, in the layout GLM ships: tokenizer.json, tokenizer_config.json and
chat_template.jinja. It holds GLM's special tokens and nanochat's six, so that both dialects can be tried on it."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 2048
# Markers that GLM declares as special; the tool and thinking tags are ordinary added tokens there, and decode to text.
GLM_SPECIAL = (
    "<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> <|observation|>".split()
)
GLM_PLAIN = (
    "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> "
    "<arg_key> </arg_key> <arg_value> </arg_value> /nothink"
).split()
NANOCHAT = "<|bos|> <|assistant_end|> <|python_start|> <|python_end|> <|output_start|> <|output_end|>".split()

# The GLM family's split: contractions, words, 1 to 3 digits, punctuation runs, line ends, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}</tools>

For each function call, output the function name and arguments within the following XML format:
<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>...</tool_call>
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == "user" -%}
<|user|>{{ message.content }}
{%- elif message.role == "system" -%}
<|system|>{{ message.content }}
{%- elif message.role == "assistant" -%}
<|assistant|><think>{{ message.reasoning_content or "" }}</think>{{ message.content or "" }}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
<tool_call>{{ function.name }}
{%- for key, value in function.arguments.items() -%}
<arg_key>{{ key }}</arg_key><arg_value>
{{- value if value is string else value | tojson(ensure_ascii=False) }}</arg_value>
{%- endfor -%}
</tool_call>
{%- endfor -%}
{%- elif message.role == "tool" -%}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" -%}<|observation|>{%- endif -%}
<tool_response>{{ message.content }}</tool_response>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>{{ "<think>" if enable_thinking else "<think></think>" }}
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """-> tokenizers.Tokenizer of exactly vocab_size tokens, the added ones last."""
    added = GLM_SPECIAL + GLM_PLAIN + NANOCHAT
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(added),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in GLM_SPECIAL + NANOCHAT])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in GLM_PLAIN])
    assert tokenizer.get_vocab_size() == vocab_size, tokenizer.get_vocab_size()
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_positions: int) -> None:
    """Write the three files; tokenizer_config.json lets transformers open the folder too."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "additional_special_tokens": GLM_SPECIAL[1:] + NANOCHAT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
