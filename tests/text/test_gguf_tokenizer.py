"""The tokenizer in a GGUF against the tokenizer.json of the same model, and metadata that no file should have."""

import json
import shutil
import unicodedata
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from errors import Refused
from settings import EMBEDDED_SNAPSHOT
from snapshot.config_file import read_config
from tests.conftest import FIXTURES, read_json
from tests.support.gguf_models import REAL, unpack_header, write_as_gguf
from tests.support.gguf_tokenizers import (
    FIXTURE,
    NORMAL,
    folder_tokenizer,
    gguf_tokenizer,
    metadata_of,
    own_json,
)
from text.gguf_pre_tokenizers import PRE_TOKENIZERS
from text.gguf_tokenizer import GgufTokenizer
from text.prompt import all_stop_ids
from text.tokenizer import TextTokenizer
from text.tokenizer_files import has_tokenizer

MODELS = list(FIXTURE["models"])
EXAMPLES = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
# Texts of everything that a pre-tokenizer or a vocabulary treats in its own way.
PIECES = st.sampled_from(
    ["'s", "'LL", "they're", " ", "  ", "\n", "\r\n", "\t", "▁", "1984", "٣", "½", "日本語", "がギ", "한국", "😶‍🌫️"]
    + ["é", "e\u0301", "ß", "Ünï", "HTTPServer", "snake_case", "<0x0A>", "...", "/", "नमस्ते", "\u00a0", "x**2"]
)


def texts_with(special):
    pieces = st.one_of(PIECES, st.text(max_size=4), st.sampled_from([*special, "</think>"]))
    return st.lists(pieces, max_size=12).map("".join)


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """-> (tokenizer of the GGUF, of the model's own tokenizer.json, name)."""
    folder = tmp_path_factory.mktemp("gguf")
    own = own_json(request.param)
    return gguf_tokenizer(folder, metadata_of(own, request.param)), folder_tokenizer(folder, own), request.param


# --- the same ids as tokenizer.json -----------------------------------------------------------------------------------


def test_ids_of_known_texts(pair):
    """The ids were made by the tokenizers library from the files of the hub."""
    ours, _, name = pair
    model = FIXTURE["models"][name]
    for text, ids in zip(FIXTURE["texts"] + model["special_texts"], model["ids"], strict=True):
        assert ours.encode(text) == ids, text


@pytest.mark.parametrize("name", MODELS)
def test_ids_of_a_file_that_llama_cpp_wrote(tmp_path, name):
    model = FIXTURE["models"][name]
    whole = REAL / model["file"] / "model.gguf"
    path = whole if whole.exists() else unpack_header(model["file"], tmp_path)
    ours = TextTokenizer(path, SimpleNamespace(vocab_size=512, text_prefix=()))
    for text, ids in zip(FIXTURE["texts"] + model["special_texts"], model["ids"], strict=True):
        assert ours.encode(text) == ids, text
    assert ours.notices == [] and ours.stop_ids and ours.render_chat([{"role": "user", "content": "Hello"}])


@EXAMPLES
@given(data=st.data())
def test_any_text_has_the_ids_of_tokenizer_json(pair, data):
    ours, own, _ = pair
    text = data.draw(texts_with(list(own.special)))
    ids = own.encode(text)
    assert ours.encode(text) == ids and ours.decode(ids) == own.decode(ids)
    assert ours.encode_as_text(text) == own.encode_as_text(text)


def test_declared_facts_are_those_of_the_folder(pair):
    ours, own, _ = pair
    for name in ("is_byte_level", "has_byte_fallback", "special", "special_ids", "own_prefix", "added_ids"):
        assert getattr(ours, name) == getattr(own, name), name
    assert ours.notices == [] and ours.tokenizer.get_vocab() == own.tokenizer.get_vocab()


def test_the_embedded_model_as_a_gguf(tmp_path):
    """The tokenizer, the chat template and the stop ids of models/tiny, from a file."""
    config = read_config(EMBEDDED_SNAPSHOT)[0]
    own, raw = TextTokenizer(EMBEDDED_SNAPSHOT, config), read_json(EMBEDDED_SNAPSHOT / "tokenizer.json")
    ids = {token["content"]: token["id"] for token in raw["added_tokens"]}
    more = {"eos_token_id": ids["<|endoftext|>"], "eot_token_id": ids["<|user|>"], "bos_token_id": ids["[gMASK]"]}
    metadata = metadata_of(raw, "glm4", config.vocab_size, **more)
    metadata["tokenizer.chat_template"] = own.chat_template
    ours = gguf_tokenizer(tmp_path, metadata, config.vocab_size)
    assert ours.special == own.special and ours.own_prefix == []
    assert {ids["<|endoftext|>"], ids["<|user|>"]} == set(ours.stop_ids)
    assert set(ours.stop_ids) <= all_stop_ids(config, ours)
    messages = [{"role": "user", "content": "Who <|user|> art thou?"}, {"role": "assistant", "content": "é 😀 12"}]
    assert ours.encode_chat(messages, enable_thinking=True) == own.encode_chat(messages, enable_thinking=True)

    @EXAMPLES
    @given(texts_with(list(own.special)))
    def same(text):
        assert ours.encode(text) == own.encode(text) and ours.decode(own.encode(text)) == text

    same()


def test_a_gguf_continues_a_text_as_its_snapshot(run_colibri, tmp_path):
    folder, own = tmp_path / "snapshot", own_json("glm4")
    shutil.copytree(FIXTURES / "glm4_moe", folder)
    template = "[gMASK]<sop><|user|>{{ messages[0].content }}"
    size = read_config(folder)[0].vocab_size
    own["added_tokens"] = [token for token in own["added_tokens"] if token["id"] < size]
    folder_tokenizer(folder, own, size, chat_template=template, eos_token="<|endoftext|>")
    metadata = metadata_of(own, "glm4", size, eos_token_id=496) | {"tokenizer.chat_template": template}
    path = write_as_gguf(folder, tmp_path / "model.gguf", metadata)
    for mode in ({"PROMPT": "The year 1984, <sop> naïve 日本"}, {"CHAT": 1, "PROMPT": "Hello <sop>"}):
        hub, ours = (run_colibri(SNAP=snapshot, NGEN=12, TEMP=0, **mode) for snapshot in (folder, path))
        assert hub.returncode == ours.returncode == 0, ours.stderr
        assert hub.stdout == ours.stdout and len(hub.stdout) > 5


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_keeps_the_text(tmp_path, pre):
    ours = gguf_tokenizer(tmp_path, metadata_of(own_json("glm4"), pre))
    for text in FIXTURE["texts"]:
        expected = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[pre].is_nfc else text
        assert ours.decode(ours.encode(text)) == expected


# By hand, from the regular expressions that the models were trained with.
SPLITS = {
    "llama-bpe": ("We'Ll 12345 día!!\n\n  x", ["We", "'Ll", " ", "123", "45", " día", "!!\n\n", " ", " x"]),
    "qwen2": ("a 12 b", ["a", " ", "1", "2", " b"]),
    "deepseek-v3": ("x=日本1234 #tag e\u0301", ["x", "=", "日本", "123", "4", " #", "tag", " e\u0301"]),
    "deepseek-llm": ("Hi you!\n日本 12 नम", ["Hi", " you", "!", "\n", "日本", " ", "1", "2", " ", "नम"]),
    "deepseek-coder": ("f(x)\n\nif 12", ["f", "(", "x", ")", "\n", "\n", "if", " ", "1", "2"]),
    "gpt-4o": ("HTTPServer camelCase it's 1234//\n", [*("HTTPServer camel Case it's".split()), "123", "4", "//\n"]),
    "tekken": ("camelCase it's 12", ["camel", "Case", " it", "'s", " ", "1", "2"]),
    "kimi-k2": ("漢字kana 漢x 1234", ["漢字", "kana", " ", "漢", "x", " ", "123", "4"]),
    "olmo": ("it's 1234  ok", ["it", "'s", " 1234", " ", " ok"]),
    "starcoder": ("x 12", ["x", " ", "1", "2"]),
    "bailingmoe": ("It'S\n\n12", ["It", "'S", "\n\n", "1", "2"]),
    "laguna": ("a\n\nb", ["a", "\n\n", "b"]),
    "qwen35": ("नमस्ते 1", ["नमस्ते", " ", "1"]),
}


@pytest.mark.parametrize("pre", sorted(SPLITS))
def test_where_a_pre_tokenizer_splits(tmp_path, pre):
    text, expected = SPLITS[pre]
    splitter = gguf_tokenizer(tmp_path, metadata_of(own_json("glm4"), pre)).tokenizer.pre_tokenizer
    parts = [text[begin:end] for _, (begin, end) in splitter.pre_tokenize_str(text)]
    if pre == "gpt-4o":  # the words with their spaces
        parts = [part.strip(" ") for part in parts if part != " "]
    assert parts == expected


# --- what else a file says --------------------------------------------------------------------------------------------


def test_special_tokens_keep_their_ids_behind_a_hole(tmp_path):
    """The library numbers added tokens one after another; a hole between them moved every id behind it."""
    metadata = metadata_of(own_json("glm4"), "glm4")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    tokens[510], tokens[503], types[510], types[503] = tokens[503], "[PAD503]", types[503], types[510]
    ours = gguf_tokenizer(tmp_path, metadata)
    assert ours.encode("a<|user|>")[-1] == 510 and ours.decode([510, 503, 511]) == "<|user|>"
    assert 503 not in ours.encode("[PAD503]") and ours.decode(ours.encode("[PAD503]")) == "[PAD503]"


def test_merges_may_be_missing(tmp_path):
    """Old files of Kimi-K2 have none: of all pairs the one with the lowest id is merged first."""
    ours = gguf_tokenizer(tmp_path, metadata_of(own_json("glm4"), "kimi-k2", merges=None))
    full = gguf_tokenizer(tmp_path, metadata_of(own_json("glm4"), "kimi-k2"))
    for text in FIXTURE["texts"]:
        ids = ours.encode(text)
        assert ours.decode(ids) == text and len(ids) <= len(full.encode(text)) + 3
    assert len(ours.encode("the year and the numbers")) < 15


@pytest.mark.parametrize(
    "pre, flag, expected",
    [("glm4", None, []), ("glm4", True, ["<sop>"]), ("llama-bpe", None, ["<sop>"]), ("llama-bpe", False, [])],
)
def test_who_puts_bos_in_front(tmp_path, pre, flag, expected):
    more = {} if flag is None else {"add_bos_token": flag}
    ours = gguf_tokenizer(tmp_path, metadata_of(own_json("glm4"), pre, bos_token_id=500, **more))
    assert ours.own_prefix == expected and ours.special_tokens == {"bos_token": "<sop>"}


def test_a_space_in_front_is_left_out_where_the_file_says_so(tmp_path):
    own = own_json("llama")
    with_space = gguf_tokenizer(tmp_path, metadata_of(own, "llama"))
    without = gguf_tokenizer(tmp_path, metadata_of(own, "llama", add_space_prefix=False))
    assert with_space.encode("a b") == without.encode(" a b") != without.encode("a b")
    assert without.decode(without.encode(" a b")) == " a b" and with_space.decode(with_space.encode("a b")) == "a b"
    assert with_space.own_prefix == without.own_prefix == ["<s>"] and with_space.stop_ids == (2,)
    # A control token is made of no text, whatever its pieces are.
    assert 2 not in with_space.encode_as_text("</s>") and 13 not in with_space.encode_as_text("<0x0A>")


def test_what_ends_an_answer(tmp_path):
    def stops(pre, **more):
        ours = gguf_tokenizer(tmp_path, metadata_of(own_json(pre), pre, **more))
        return [ours.tokenizer.id_to_token(i) for i in ours.stop_ids]

    assert stops("qwen2") == ["<|endoftext|>", "<|im_end|>"]
    # In harmony <|end|> ends a message, not the answer; elsewhere it does.
    assert stops("gpt-4o", eos_token_id=498) == ["<|endoftext|>", "<|return|>", "<|call|>"]
    named = {"eos_token_id": 496, "eot_token_id": 503, "eom_token_id": 505}
    assert stops("glm4", **named) == ["<|endoftext|>", "<|user|>", "<|observation|>"]
    assert stops("glm4", eos_token_id=4294967295) == ["<|endoftext|>"]
    assert stops("llama") == ["</s>"]


def test_an_end_token_that_a_converter_calls_normal(tmp_path):
    """It was text: <|im_end|> of a template came out in letters, and the answer went on."""
    metadata = metadata_of(own_json("qwen2"), "qwen2")
    at = metadata["tokenizer.ggml.tokens"].index("<|im_end|>")
    metadata["tokenizer.ggml.token_type"][at] = NORMAL
    ours = gguf_tokenizer(tmp_path, metadata)
    assert ours.encode("a<|im_end|>")[-1] == at and at in ours.stop_ids and at in ours.special_ids
    # A normal </s> is a piece of HTML.
    metadata["tokenizer.ggml.tokens"][at] = "</s>"
    assert at not in gguf_tokenizer(tmp_path, metadata).stop_ids


def test_named_chat_templates(tmp_path):
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "{{ tools[0] }}"}
    names = {"tokenizer.chat_templates": ["tool_use"]}
    ours = gguf_tokenizer(tmp_path, metadata_of(own_json("qwen2"), "qwen2") | templates | names)
    question = [{"role": "user", "content": "x"}]
    assert ours.render_chat(question) == "plain" and ours.render_chat(question, tools=["read"]) == "read"
    bare = gguf_tokenizer(tmp_path, metadata_of(own_json("qwen2"), "qwen2"))
    with pytest.raises(Refused, match=r"model\.gguf: has no chat template"):
        bare.render_chat(question)


@pytest.mark.parametrize("extra", [{}, {"tokenizer.chat_template.tool_use": "{{ tools }}"}])
def test_files_for_a_folder(tmp_path, extra):
    """A snapshot that is made from a GGUF has the same tokenizer and templates."""
    metadata = metadata_of(own_json("deepseek-v3"), "deepseek-v3") | {"tokenizer.chat_template": "plain"} | extra
    GgufTokenizer(tmp_path / "model.gguf", metadata).files().save(tmp_path, model_max_length=99)
    ours = gguf_tokenizer(tmp_path, metadata)
    folder = TextTokenizer(tmp_path, SimpleNamespace(vocab_size=512, text_prefix=()))
    for name in ("chat_templates", "special_tokens", "special", "own_prefix", "is_byte_level"):
        assert getattr(ours, name) == getattr(folder, name), name
    assert read_json(tmp_path / "tokenizer_config.json")["model_max_length"] == 99 and folder.notices == []
    assert all(ours.encode(text) == folder.encode(text) for text in FIXTURE["texts"])


# --- a pre-tokenizer that is not known --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more, named",
    [
        ({"pre": "newest"}, "tokenizer.ggml.pre is 'newest'"),
        ({"pre": "default"}, "tokenizer.ggml.pre is 'default'"),
        ({"pre": None}, "tokenizer.ggml.pre is None"),
        ({"pre": ["qwen2"]}, r"tokenizer.ggml.pre is \['qwen2'\]"),
        ({"model": "gemma4"}, "tokenizer.ggml.model is 'gemma4'"),
        ({"model": None}, "tokenizer.ggml.model is None"),
    ],
)
def test_unknown_is_refused_by_name_and_mended_by_tokenizer_json(tmp_path, more, named):
    own = own_json("qwen35")
    metadata = metadata_of(own, "qwen35", **more)
    with pytest.raises(Refused, match=rf"model\.gguf: {named}, .*put the model's own tokenizer\.json beside"):
        gguf_tokenizer(tmp_path, metadata)
    folder = folder_tokenizer(tmp_path, own)
    ours = gguf_tokenizer(tmp_path, metadata)
    assert all(ours.encode(text) == folder.encode(text) for text in FIXTURE["texts"])
    assert len(ours.notices) == 1 and "tokenizer.json beside model.gguf counts" in ours.notices[0]


def test_the_tokenizer_json_of_another_model_is_refused(tmp_path):
    other = own_json("qwen35")
    vocab = other["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    metadata = metadata_of(own_json("qwen35"), "newest")
    with pytest.raises(Refused, match=r"tokenizer\.json: is of another model: the token 64 of model\.gguf is 'a'"):
        gguf_tokenizer(tmp_path, metadata)
    (tmp_path / "tokenizer.json").write_text('{"model": []}')
    with pytest.raises(Refused, match=r"tokenizer\.json: is no BPE tokenizer"):
        gguf_tokenizer(tmp_path, metadata)


def test_a_file_may_hold_tokenizer_json(tmp_path):
    own = own_json("qwen35")
    metadata = metadata_of(own, "newest") | {"tokenizer.huggingface.json": json.dumps(own)}
    assert gguf_tokenizer(tmp_path, metadata).encode("नमस्ते 1") == folder_tokenizer(tmp_path, own).encode("नमस्ते 1")
    metadata["tokenizer.huggingface.json"] = "{"
    with pytest.raises(Refused, match=r"tokenizer\.huggingface\.json is not valid JSON"):
        gguf_tokenizer(tmp_path, metadata)


def test_a_file_without_a_tokenizer(tmp_path):
    """SCORE takes token ids without one; texts are refused."""
    assert has_tokenizer(EMBEDDED_SNAPSHOT) and not has_tokenizer(tmp_path)
    with pytest.raises(Refused, match=r"model\.gguf: has no vocabulary \(tokenizer\.ggml\.tokens\)"):
        gguf_tokenizer(tmp_path, {})
    assert not has_tokenizer(tmp_path / "model.gguf")
    gguf_tokenizer(tmp_path, metadata_of(own_json("qwen2"), "qwen2"))
    assert has_tokenizer(tmp_path / "model.gguf")


# --- metadata that no file should have --------------------------------------------------------------------------------


def change(**more):
    return lambda metadata: metadata | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def change_item(name, at, value):
    def apply(metadata):
        values = list(metadata[f"tokenizer.ggml.{name}"])
        values[at] = value
        return metadata | {f"tokenizer.ggml.{name}": values}

    return apply


@pytest.mark.parametrize(
    "pre, damage, line",
    [
        ("qwen2", change(tokens=[1, 2]), "tokenizer.ggml.tokens is no list of str"),
        ("qwen2", change(tokens="x"), "tokenizer.ggml.tokens is no list of str"),
        ("qwen2", change(token_type=[1]), "has 512 tokens, but 1 types of tokens"),
        ("qwen2", change(token_type=[0.5]), "tokenizer.ggml.token_type is no list of int"),
        ("qwen2", change_item("tokens", 5, "he"), r"tokens 5 and \d+ are both 'he'; the file is broken"),
        ("qwen2", change_item("tokens", 5, "x" * 5000), "has a token of 5000 characters, above the limit of 1024"),
        ("qwen2", change_item("merges", 3, "ab"), r"tokenizer.ggml.merges\[3\] is 'ab', expected two pieces"),
        ("qwen2", change_item("merges", 3, " "), r"tokenizer.ggml.merges\[3\] is ' ', expected two pieces"),
        ("qwen2", change_item("merges", 3, "zzz q"), "is not a tokenizer .*zzz.* out of vocabulary"),
        ("qwen2", change(eos_token_id=512), "tokenizer.ggml.eos_token_id=512: expected a whole number from 0 to 511"),
        ("qwen2", change(eos_token_id="2"), "tokenizer.ggml.eos_token_id='2': expected a whole number from 0 to 511"),
        ("qwen2", change(add_bos_token=1), "tokenizer.ggml.add_bos_token=1: expected true or false"),
        ("llama", change(scores=[1.0]), "has 512 tokens, but 1 scores"),
        ("llama", change(add_space_prefix="no"), "tokenizer.ggml.add_space_prefix='no': expected true or false"),
    ],
)
def test_broken_metadata_is_refused(tmp_path, pre, damage, line):
    with pytest.raises(Refused, match=rf"model\.gguf: {line}"):
        gguf_tokenizer(tmp_path, damage(metadata_of(own_json(pre), pre)))


def test_merges_of_endless_tokens_are_not_derived(tmp_path):
    """The work grows with the squares of their lengths."""
    tokens = [f"{i:0>1024}" for i in range(9000)]
    metadata = change(tokens=tokens, token_type=[NORMAL] * 9000, scores=[0.0] * 9000)(
        metadata_of(own_json("llama"), "llama")
    )
    with pytest.raises(Refused, match=r"model\.gguf: has tokens of 92\d{5} characters, above the limit of 8388608"):
        gguf_tokenizer(tmp_path, metadata, size=9000)


def test_a_vocabulary_that_does_not_fit_the_model(tmp_path):
    metadata = metadata_of(own_json("llama"), "llama")
    with pytest.raises(Refused, match=r"has 512 pieces, the model a vocabulary of 500; they belong to different"):
        gguf_tokenizer(tmp_path, metadata, size=500)


VALUES = st.one_of(
    st.integers(-3, 600), st.floats(), st.booleans(), st.text(max_size=5), st.just([]), st.lists(st.integers(0, 9))
)
KEYS = "model pre tokens token_type merges scores bos_token_id eos_token_id unknown_token_id add_bos_token".split()


@EXAMPLES
@given(st.sampled_from(["qwen2", "llama"]), st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1), st.data())
def test_any_metadata_gives_a_tokenizer_or_one_line(tmp_path, pre, more, data):
    metadata = metadata_of(own_json(pre), pre)
    for name, value in (("token_type", st.integers(-2, 9)), ("tokens", st.text(max_size=3))):
        if data.draw(st.booleans()):
            metadata = change_item(name, data.draw(st.integers(0, 511)), data.draw(value))(metadata)
    metadata = change(**more)(metadata)
    try:
        files = GgufTokenizer(tmp_path / "model.gguf", metadata).files()
    except Refused as error:
        assert len(str(error).split("\n")) == 1
        return
    assert json.loads(files.data)["model"]["type"] == "BPE" and files.stop_tokens is not None
