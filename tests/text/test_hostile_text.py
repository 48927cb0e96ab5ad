"""Hostile tokenizers and chat templates: they work or are refused in one line."""

import json

from hypothesis import given
from hypothesis import strategies as st

from settings import EMBEDDED_SNAPSHOT
from snapshot.config_file import read_config
from tests.conftest import read_json
from tests.support.hostile import TEXT_FILES, dump, few, odd, opened, refused, replaced, text_of
from text.tokenizer import TextTokenizer

TOKENIZER = read_json(EMBEDDED_SNAPSHOT / "tokenizer.json")
ROWS = read_json(EMBEDDED_SNAPSHOT / "config.json")["vocab_size"]  # as many as the tokenizer has pieces


def change_tokenizer(folder, change):
    tokenizer = json.loads(json.dumps(TOKENIZER))
    change(tokenizer)
    (folder / "tokenizer.json").write_bytes(dump(tokenizer))


def rename_to_a_far_row(tokenizer):
    """As many pieces as rows of the embedding, but one id far beyond the last row."""
    tokenizer["added_tokens"].pop()
    tokenizer["model"]["vocab"]["z9"] = 2**32 - 1


WORDS_WITHOUT_UNKNOWN = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "q"}
BAD_TOKENIZERS = [
    # The library renumbers an added token in silence, so the declared id is checked.
    (lambda t: t["added_tokens"].pop(3), "a hole in the ids of its added tokens"),
    (lambda t: t["added_tokens"][-1].update(id=ROWS), "a hole in the ids of its added tokens"),
    (
        lambda t: t["added_tokens"].append(t["added_tokens"][0] | {"content": "<new>"}),
        "before '<new>', declared as 2021",
    ),
    (lambda t: t["model"]["vocab"].update({f"z{i}": 3000 + i for i in range(100)}), f"has {ROWS - 27 + 100} pieces"),
    (rename_to_a_far_row, "gives 'z9' the id 4294967295"),
    # A panic, which `except Exception` misses; a bare exception; one that comes late.
    (lambda t: t.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "is not a tokenizer"),
    (lambda t: t.update(decoder={"type": "Nothing"}), "is not a tokenizer"),
    (
        lambda t: t.update(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "q"}, added_tokens=[]),
        "cannot encode this text",
    ),
]


def test_a_broken_or_foreign_tokenizer_is_refused(text_folder):
    for change, message in BAD_TOKENIZERS:
        change_tokenizer(text_folder, change)
        refused(text_folder, "tokenizer.json: ", message, action=text_of)


def test_truncation_and_padding_are_off(text_folder):
    """Many published files keep the truncation and padding of the training run."""
    config = read_config(text_folder)[0]
    plain = TextTokenizer(text_folder, config).encode("In the beginning")
    truncation = dict(max_length=2, strategy="LongestFirst", stride=0, direction="Right")
    padding = dict(strategy={"Fixed": 100}, direction="Right", pad_to_multiple_of=None, pad_id=0, pad_type_id=0)
    change_tokenizer(text_folder, lambda t: t.update(truncation=truncation, padding=padding | {"pad_token": "x"}))
    assert TextTokenizer(text_folder, config).encode("In the beginning") == plain


@few
@given(st.sampled_from(sorted(TOKENIZER)), st.booleans(), odd)
def test_other_values_in_a_tokenizer(text_folder, key, inside, value):
    inside = inside and isinstance(TOKENIZER[key], dict)
    change_tokenizer(text_folder, lambda t: t.update({key: dict.fromkeys(TOKENIZER[key], value) if inside else value}))
    opened(text_folder, text_of)


KEYS = ("added_tokens_decoder", "eos_token", "extra_special_tokens", "chat_template", "bos_token")
tokens = st.dictionaries(st.sampled_from(["content", "special", "lstrip"]), odd, max_size=3)
decoders = st.dictionaries(st.sampled_from(["2021", "5", "x", "9" * 5000]), tokens | odd, max_size=3) | odd


@few
@given(st.dictionaries(st.sampled_from(KEYS), odd, max_size=2), decoders, odd | tokens.map(lambda t: {"eos_token": t}))
def test_other_values_in_the_files_that_declare_tokens(text_folder, fields, decoder, mapped):
    (text_folder / "tokenizer_config.json").write_bytes(dump({"added_tokens_decoder": decoder} | fields))
    (text_folder / "special_tokens_map.json").write_bytes(dump(mapped))
    opened(text_folder, text_of)


def test_text_that_is_not_utf8(text_folder):
    for name in TEXT_FILES:
        with replaced(text_folder / name, (text_folder / name).read_bytes() + b"\xff"):
            refused(text_folder, f"{name}: is not valid ", action=text_of)


def test_stop_tokens_and_templates_of_any_type(text_folder):
    (text_folder / "chat_template.jinja").unlink()
    for value in ("\ud800", {"content": "\ud800"}, 5, ["a"], {"content": None}):
        (text_folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": value, "chat_template": value}))
        refused(text_folder, action=text_of)


BAD_TEMPLATES = """
{{ 1 / 0 }} & {{ messages + 1 }} & {{ messages[0].x.y.z }} & {{ '%d' % 'x' }} & {% include 'x' %}
{{ messages.append(1) }} & {{ range(10**9) | list }} & {% macro f() %}{{ f() }}{% endmacro %}{{ f() }}
{{ raise_exception('a\\nb') }} & {{ messages | tojson(indent=[1]) }} & {{ DEEP }}"""


def test_any_failure_of_a_template_is_refused(text_folder):
    """A template is a program, and can fail as any program can."""
    for template in BAD_TEMPLATES.strip().replace("\n", " & ").split(" & "):
        (text_folder / "chat_template.jinja").write_text(template.replace("DEEP", "(" * 300 + "1" + ")" * 300))
        refused(text_folder, "the chat template failed", action=text_of)
