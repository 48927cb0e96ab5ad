"""The streaming detokenizer over every kind of tokenizer: any ids, cut anywhere, behind any prompt."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from errors import Refused
from tests.support.small_tokenizers import BYTE_PIECES, KINDS, SPECIAL, write_tokenizer
from text.detokenizer import Detokenizer

BYTE_FALLBACK = ("llama2", "mixtral", "gemma", "byte_unigram")
NUM_ROWS = 320  # some of which have no token


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {kind: write_tokenizer(tmp_path_factory.mktemp(kind), kind, NUM_ROWS) for kind in KINDS}


def ids_of(tokenizer, pieces):
    return [tokenizer.tokenizer.token_to_id(piece) for piece in pieces]


def stream(tokenizer, ids, before=(), hidden_ids=()):
    """The text of the ids, one by one."""
    detokenizer = Detokenizer(tokenizer, before, hidden_ids)
    pieces = [detokenizer.add_token(token) for token in ids]
    assert detokenizer.text == "".join(pieces)
    return detokenizer.text + detokenizer.flush()


def definition(kind, tokenizer, ids):
    """The text of ids: of the library where there are no pieces of bytes, else of SentencePiece, whose pieces are bytes
    that make up one text. The library makes U+FFFD of every byte of a run that is not valid as a whole."""
    if kind not in BYTE_FALLBACK:
        return tokenizer.tokenizer.decode(ids, skip_special_tokens=False)
    pieces = [piece for i in ids if (piece := tokenizer.tokenizer.id_to_token(i)) is not None]
    if kind != "gemma" and pieces and pieces[0].startswith("▁"):
        pieces[0] = pieces[0][1:]
    parts = [bytes([int(p[3:5], 16)]) if p in BYTE_PIECES else p.replace("▁", " ").encode() for p in pieces]
    return b"".join(parts).decode("utf-8", "replace")


# Bytes that begin, continue and never stand in a character come often.
ID = st.one_of(
    st.integers(0, NUM_ROWS - 1), st.sampled_from([5 + byte for byte in (0x0A, 0x41, 0x80, 0xA9, 0xC3, 0xF0, 0xFF)])
)


@pytest.mark.parametrize("kind", KINDS)
def test_any_ids_are_decoded_and_an_answer_sees_what_stands_before(tokenizers, kind):
    """Once "Invalid prefix encountered while decoding stream" ended a run of a model with byte fallback, and the space
    between a prompt and its answer was lost. A text is the same at once, one token at a time, and as prompt and answer,
    wherever it is cut."""
    tokenizer = tokenizers[kind]

    @settings(max_examples=200)
    @given(st.lists(ID, max_size=12), st.integers(0, 12))
    def check(ids, cut):
        expected = definition(kind, tokenizer, ids)
        assert tokenizer.decode(ids) == stream(tokenizer, ids) == expected
        prompt = Detokenizer(tokenizer)
        first = "".join(map(prompt.add_token, ids[:cut]))
        assert first + stream(tokenizer, ids[cut:], before=ids[:cut]) == expected

    check()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (*BYTE_FALLBACK, "byte_level")])
def test_hidden_tokens_leave_the_text_that_the_library_gives_without_special_tokens(tokenizers, kind):
    tokenizer = tokenizers[kind]

    @settings(max_examples=100)
    @given(st.lists(ID, max_size=8), st.integers(0, 8))
    def check(ids, cut):
        expected = tokenizer.tokenizer.decode(ids, skip_special_tokens=True)
        hidden = tokenizer.special_ids
        assert stream(tokenizer, ids, hidden_ids=hidden) == expected
        first = Detokenizer(tokenizer, hidden_ids=hidden)
        text = "".join(map(first.add_token, ids[:cut]))
        assert text + stream(tokenizer, ids[cut:], ids[:cut], hidden) == expected

    check()


@pytest.mark.parametrize("kind", BYTE_FALLBACK)
def test_bytes_that_are_no_character(tokenizers, kind):
    """A line end, half a character and a word: the model of the report wrote them."""
    tokenizer = tokenizers[kind]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add_token(i) for i in ids_of(tokenizer, ["<0x0A>", "<0xF0>", "▁the"])] == [
        "\n",
        "",
        "\ufffd the",
    ]
    smile = ids_of(tokenizer, [f"<0x{byte:02X}>" for byte in "😀".encode()])
    assert stream(tokenizer, smile[2:], before=smile[:2]) == "😀"  # the prompt ended within it
    assert stream(tokenizer, smile[:-1]) == "\ufffd"
    user = ids_of(tokenizer, ["<|user|>"])
    assert stream(tokenizer, smile[:2] + user + smile[2:], hidden_ids=user) == "\ufffd\ufffd\ufffd"


@pytest.mark.parametrize("kind", ["llama2", "mixtral", "unigram", "byte_unigram", "word_piece"])
def test_the_space_between_prompt_and_answer_stays(tokenizers, kind):
    """A prompt "Once upon a" continued by "▁time" read "Once upon atime"."""
    tokenizer = tokenizers[kind]
    prompt, answer = tokenizer.encode("the"), ids_of(tokenizer, ["time" if kind == "word_piece" else "▁time"])
    assert stream(tokenizer, answer, before=prompt) == " time" and stream(tokenizer, answer) == "time"
    special = ids_of(tokenizer, SPECIAL[1:2])
    assert stream(tokenizer, answer, special, special) == "time"  # no text stands before it


def test_a_prompt_of_hidden_tokens_at_its_end(tokenizers):
    tokenizer = tokenizers["mixtral"]
    special = ids_of(tokenizer, ["</s>"])
    before = [*tokenizer.encode("the"), *special * 20]
    assert stream(tokenizer, ids_of(tokenizer, ["▁time"]), before, special) == " time"


def test_a_failure_of_the_library_is_refused_in_one_line(tokenizers, monkeypatch):
    """Whatever it raises, a run ends in one line and a server goes on."""
    tokenizer = tokenizers["llama2"]

    class Failing:
        id_to_token = tokenizer.tokenizer.id_to_token

        def decode(self, *arguments, **options):
            raise Exception("Invalid prefix encountered while decoding stream")

    monkeypatch.setattr(tokenizer, "tokenizer", Failing())
    with pytest.raises(Refused, match=r"tokenizer\.json: cannot decode these ids \(Invalid prefix"):
        Detokenizer(tokenizer).add_token(5 + 256 + 1)


def test_the_bytes_of_a_token_behind_itself_are_its_usual_text(tokenizers):
    """Names of tokens beside log-probabilities."""
    texts = {
        "llama2": ("▁the", " the"),
        "gemma": ("▁", " "),
        "byte_level": ("Ġthe", " the"),
        "unigram": ("▁the", " the"),
    }
    texts |= {"word_piece": ("##me", "me"), "mixtral": ("<|user|>", "<|user|>"), "byte_unigram": ("<0xF0>", b"\xf0")}
    for kind, (piece, text) in texts.items():
        [token] = ids_of(tokenizers[kind], [piece])
        assert tokenizers[kind].token_bytes(token, token) == (text if isinstance(text, bytes) else text.encode())
    assert tokenizers["llama2"].token_bytes(NUM_ROWS - 1, None) == b""
