"""Engine on models by heads: called as nanochat's GPT calls its own; gradients, memory, terminal ids."""

import warnings

import pytest
import torch

import generate.engine
from errors import Refused
from generate.engine import Engine
from generate.head_batch import cache_dtype, named_terminal_ids
from generate.sampler import Sampler
from tests.support.head_model import VOCAB, SmallGpt

PROMPT = [5, 9, 2, 41]


def full_forwards(model, count, sampler):
    """The definition: a forward without a cache for every token."""
    ids = list(PROMPT)
    for position in range(len(ids), len(ids) + count):
        with torch.inference_mode():
            ids.append(sampler.sample(model(torch.tensor([ids]))[0, -1], position))
    return ids


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_is_called_as_nanochats_gpt_needs_no_adapter(dtype, temperature):
    """Its forward took the KV cache for `targets`, asked the cache in vain for prev_embedding, cache_seqlens and
    n_layers, and got keys in float32 for queries in bfloat16."""
    model = SmallGpt(dtype)
    sequences, _ = Engine(model).generate_batch(tokens=PROMPT, num_samples=3, max_tokens=20, temperature=temperature)
    assert model.cache_dtypes == {dtype}
    if dtype == torch.float32:
        samplers = [Sampler(temperature, seed=42, row=row) for row in range(3)]
        assert sequences == [full_forwards(model, 20, sampler) for sampler in samplers]
    assert len({tuple(ids) for ids in sequences}) == (3 if temperature else 1)


def test_sequences_that_end_leave_the_cache_and_the_others_do_not_change():
    """Keys, values and the embedding before, of each row, move to their new row."""
    model = SmallGpt(torch.float32)
    options = dict(num_samples=8, max_tokens=24, seed=3)
    whole, _ = Engine(model).generate_batch(PROMPT, **options)
    ends = {whole[0][8], whole[3][6], whole[5][12]}
    some, _ = Engine(model, terminal_ids=ends).generate_batch(PROMPT, **options)
    for ids, text in zip(some, whole, strict=True):
        stop = next((at for at in range(len(PROMPT), len(text)) if text[at] in ends), len(text))
        assert ids == text[:stop]


def test_parameters_that_require_gradients_keep_no_graph():
    """Each forward was kept for a backward pass, 329 MB instead of 38, and a warning came."""
    model, kept = SmallGpt(), []

    def pack(tensor):
        kept.append(tensor.shape)
        return tensor

    steps = Engine(model).generate(PROMPT, num_samples=2, max_tokens=5)
    with warnings.catch_warnings(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        warnings.simplefilter("error")
        assert len(list(steps)) == 5
    assert not kept and torch.is_grad_enabled() and all(each.requires_grad for each in model.parameters())


def test_a_cache_by_another_name_is_the_second_argument():
    class Other(SmallGpt):
        def forward(self, ids, cache):
            return super().forward(ids, kv_cache=cache)

    class Wrapped(SmallGpt):  # as torch.compile wraps a model
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    options = dict(num_samples=2, max_tokens=6)
    expected = Engine(SmallGpt()).generate_batch(PROMPT, **options)
    assert Engine(Other()).generate_batch(PROMPT, **options) == expected
    assert Engine(Wrapped()).generate_batch(PROMPT, **options) == expected


def test_the_dtype_of_the_cache():
    """Its compute_dtype, else that of its rotary table, else that of its parameters."""
    model = SmallGpt(torch.bfloat16)
    assert cache_dtype(model) == torch.bfloat16
    model.cos = model.cos.half()
    assert cache_dtype(model) == torch.float16
    model.config.compute_dtype = torch.float64
    assert cache_dtype(model) == torch.float64
    plain = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    plain.config = model.config
    del model.config.compute_dtype
    assert cache_dtype(plain) == torch.bfloat16


class NamingTokenizer:
    """Names its special tokens as nanochat's does."""

    def encode_special(self, text):
        return {"<|assistant_end|>": 60, "<|python_start|>": 61}[text]

    def get_bos_token_id(self):
        return 63


def test_rows_stop_at_assistant_end_and_bos_where_the_tokenizer_names_them():
    """They ran on to max_tokens: only ids that were given ended a row."""
    assert Engine(SmallGpt(), NamingTokenizer()).terminal_ids == {60, 63}
    assert Engine(SmallGpt(), NamingTokenizer(), terminal_ids=()).terminal_ids == set()
    sequences, _ = Engine(SmallGpt(), NamingTokenizer()).generate_batch(
        PROMPT, num_samples=20, max_tokens=40, temperature=2.0
    )
    lengths = {len(ids) for ids in sequences}
    assert len(lengths) > 1 and not any({60, 63} & set(ids) for ids in sequences)

    class OnlyBos(NamingTokenizer):
        def encode_special(self, text):
            raise KeyError(text)

    assert named_terminal_ids(OnlyBos()) == {63} and named_terminal_ids(object()) == named_terminal_ids(None) == set()


def test_rows_that_memory_does_not_hold_are_refused_with_numbers(monkeypatch):
    """The cache was allocated as if there were memory without end."""
    monkeypatch.setattr(generate.engine, "available_bytes", lambda: 100_000)
    engine = Engine(SmallGpt())  # 2 layers, keys and values of 2 heads of 8 in 2 bytes: 128 bytes a position
    with pytest.raises(Refused, match=r"99 sequences of 24 tokens need 0\.000 GB .* at most 32 sequences, or 7 tokens"):
        next(engine.generate(PROMPT, num_samples=99, max_tokens=20))
    assert len(next(engine.generate(PROMPT, num_samples=32, max_tokens=20))[0]) == 32
    with pytest.warns(UserWarning, match="20 sequences of 64 tokens need .* they end at 38 tokens"):
        steps = list(engine.generate(PROMPT, num_samples=20))
    assert len(steps) == 38 - len(PROMPT)
    assert all(0 <= token < VOCAB for token in steps[-1][0])
