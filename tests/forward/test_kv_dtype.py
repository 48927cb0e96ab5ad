"""KV_DTYPE=bf16 and int8: less memory, the same bits as the same values in float32, a notice in every run."""

from dataclasses import replace

import pytest
import torch

from bench import cost
from forward.kv_cache import KV_DTYPES, kv_cache_bytes, make_kv_cache
from forward.scratch import scratch_bytes
from forward.step import step, step_all
from kernels import dispatch, reference
from kernels.build import VARIANTS
from kernels.formats import FORMATS
from kernels.kv_rows import Int8Rows, int8_row_bytes
from kernels.processor import processor_flags
from settings import EMBEDDED_SNAPSHOT
from tests.conftest import FIXTURES, read_json
from tests.forward.test_bits import ids_of, need_kernels
from tests.forward.test_forward import all_logits
from tests.kernels.test_kernels import attention_case, kernels, randn  # noqa: F401

# --- kernels ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def with_threads(kernels):  # noqa: F811
    """Every instruction set, with one thread and with two."""

    def each():
        for native in kernels.values():
            for threads in (1, 2):
                native.set_threads(threads)
                yield native

    yield each
    for native in kernels.values():
        native.set_threads(1)


def stored(kv_dtype, rows):
    """Rows [S, width] or [S, heads, width] as a KV cache keeps them."""
    if kv_dtype == "bf16":
        return rows.bfloat16()
    num_heads, width = (1 if rows.dim() == 2 else rows.shape[1]), rows.shape[-1]
    out = torch.empty(len(rows), num_heads * int8_row_bytes(width), dtype=torch.uint8)
    reference.quantize_kv(rows.flatten(1), num_heads, out)
    return Int8Rows(out, width) if rows.dim() == 2 else Int8Rows(out, width).heads(num_heads)


both = pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])


def same(a, b):
    """Equal bits; one NaN is as good as another."""
    return torch.equal(a.nan_to_num(nan=1e30), b.nan_to_num(nan=1e30)) and torch.equal(a.isnan(), b.isnan())


# Heads, nope, rope, value and latent widths, positions: whole steps of 32 columns, then widths that are filled up.
SHAPES = [(9, 16, 32, 20, 64, 90), (8, 16, 8, 20, 24, 90), (3, 12, 16, 9, 130, 77), (2, 8, 5, 8, 7, 40)]


@both
@pytest.mark.parametrize("topk", [None, 21])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_gives_the_bits_of_the_same_values_in_float32(with_threads, shape, topk, kv_dtype):
    H, N, R, V, L, S = shape
    T, scale = 20, (N + R) ** -0.5
    queries, kv_b, latents, rope_keys = attention_case(H, N, R, V, L, S, T, FORMATS["int4-g64"])
    latents[3, 5], latents[S - 2, 1], rope_keys[S - 4, 2] = (
        torch.nan,
        torch.inf,
        1e-40,
    )  # some rows do not attend to them
    first, selection = S - T, None
    if topk:  # not all rows select the position that is NaN
        g = torch.Generator().manual_seed(9)
        chosen = [sorted(torch.randperm(first + t + 1, generator=g)[: topk - t % 3].tolist()) for t in range(T)]
        selection = torch.tensor([row + [-1] * (topk - len(row)) for row in chosen])
    else:
        latents[3, 5] = 1
    latents, rope_keys = stored(kv_dtype, latents), stored(kv_dtype, rope_keys)

    def attend(where, keys, start, stop):
        cached = [part[: first + stop] for part in keys]
        some = None if selection is None else selection[start:stop]
        return where.absorbed_attention(queries[start:stop], kv_b, *cached, first + start, some, V, scale)

    floats = latents.float(), rope_keys.float()
    assert same(attend(reference, (latents, rope_keys), 0, T), attend(reference, floats, 0, T))
    expected = None
    for native in with_threads():
        expected = attend(native, floats, 0, T) if expected is None else expected
        assert same(attend(native, (latents, rope_keys), 0, T), expected), native.name
        for start, stop in ((0, 1), (1, 3), (3, 17), (17, 20)):  # few rows take another path than many
            assert same(attend(native, (latents, rope_keys), start, stop), expected[start:stop]), (native.name, start)
    assert expected.isfinite().any() and not expected.isfinite().all()


@both
@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize("shape", [(8, 2, 64, 32), (6, 3, 20, 70), (5, 5, 7, 9)], ids=str)
def test_gqa_gives_the_bits_of_the_same_values_in_float32(with_threads, shape, window, kv_dtype):
    H, G, D, V = shape
    queries = randn(12, H, D)
    keys, values = stored(kv_dtype, randn(70, G, D, seed=1)), stored(kv_dtype, randn(70, G, V, seed=2))
    rest = 58, window, None, 0.2
    exact = reference.grouped_attention(queries, keys.float(), values.float(), *rest)
    assert torch.equal(reference.grouped_attention(queries, keys, values, *rest), exact)
    for native in with_threads():
        expected = native.grouped_attention(queries, keys.float(), values.float(), *rest)
        assert torch.equal(native.grouped_attention(queries, keys, values, *rest), expected), native.name
        assert torch.equal(native.grouped_attention(queries[9:], keys, values, 67, window, None, 0.2), expected[9:])
        torch.testing.assert_close(expected, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [1, 7, 16, 64, 65, 130, 512])
def test_the_kernels_store_the_bytes_of_the_reference(with_threads, width):
    """Ties, zeros, tiny and huge numbers, groups that are not finite."""
    rows = torch.cat([randn(6, 2 * width), randn(3, 2 * width, seed=1) * 1e30, randn(3, 2 * width, seed=2) * 1e-42])
    rows[1] = 0
    rows[2, ::3] = torch.tensor(63.5) * rows[2].abs().max() / 127
    rows[3, 0], rows[4, -1] = torch.nan, torch.inf
    expected = torch.full((12, 2 * int8_row_bytes(width)), 77, dtype=torch.uint8)
    reference.quantize_kv(rows, 2, expected)
    floats = Int8Rows(expected, width).heads(2).float().flatten(1)
    error = (floats - rows).abs() / rows.abs().amax(-1, keepdim=True)
    assert error[[0, 2, *range(5, 9)]].max() < 0.6 / 127 and (floats[[1, 9, 10, 11]] == 0).all()
    assert floats[3, 0].isnan() and floats[4, -1].isnan() and floats[3, width:].isfinite().all()
    for native in with_threads():
        found = torch.full_like(expected, 78)
        native.quantize_kv(rows, 2, found)
        assert torch.equal(found, expected), native.name


@both
@pytest.mark.parametrize("shape", [(5, 8, 32, 40), (3, 32, 128, 130), (4, 3, 20, 66), (1, 2, 1, 1)], ids=str)
def test_index_scores_give_the_bits_of_the_same_values_in_float32(with_threads, shape, kv_dtype):
    T, H, D, S = shape
    queries, weights, keys = randn(T, H, D), randn(T, H, seed=1), stored(kv_dtype, randn(S, D, seed=2))
    assert torch.equal(
        reference.index_scores(queries, weights, keys), reference.index_scores(queries, weights, keys.float())
    )
    expected = None
    for native in with_threads():
        expected = native.index_scores(queries, weights, keys.float()) if expected is None else expected
        assert torch.equal(native.index_scores(queries, weights, keys), expected), native.name
        assert torch.equal(native.index_scores(queries[-1:], weights[-1:], keys), expected[-1:])
        assert torch.equal(native.index_scores(queries, weights, keys[: S // 2 + 1]), expected[:, : S // 2 + 1])


# --- the KV cache -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["bf16", "int8"])
def model(load, request):
    return load(FIXTURES / "glm_moe_dsa_mtp", KV_DTYPE=request.param).model


def test_it_takes_less_memory(load, model):
    kv_dtype = model.config.kv_dtype
    plain = load(FIXTURES / "glm_moe_dsa_mtp")
    kv = make_kv_cache(model.config, 100)
    num_bytes = sum(t.numel() * t.element_size() for t in (kv.latents, kv.rope_keys, kv.index_keys))
    assert num_bytes == sum(t.nbytes for t in kv.tensors) == kv_cache_bytes(model.config, 100)
    most = sum(t.nbytes for t in make_kv_cache(plain.config, 100).tensors)
    assert num_bytes == most // 2 if kv_dtype == "bf16" else most // 4 < num_bytes < most // 3
    loaded = load(FIXTURES / "glm_moe_dsa_mtp", KV_DTYPE=kv_dtype, CTX=100)
    assert loaded.plan.kv_bytes == num_bytes
    for count in (cost.kv_bytes_per_token, lambda config: cost.kv_bytes_read(config, 50)):
        share = count(model.config) / count(plain.config)
        assert share == 0.5 if kv_dtype == "bf16" else 0.25 < share < 0.34


def test_the_reference_converts_to_float32_and_the_plan_counts_it(model):
    plain = replace(model.config, kv_dtype="f32")
    more = scratch_bytes(model.config, 64, 4096) - scratch_bytes(plain, 64, 4096)
    assert more == 4 * 4096 * (plain.kv_lora_rank + plain.rope_head_dim)
    assert scratch_bytes(model.config, 64, 4096, True) == scratch_bytes(plain, 64, 4096, True)


def test_what_is_appended_is_rounded_half_to_even(load):
    config = load(FIXTURES / "glm_moe_dsa_mtp", KV_DTYPE="bf16").config
    step_of_one = 2.0**-7  # between bfloat16 numbers from 1 to 2
    kv = make_kv_cache(config, 8)
    given = torch.tensor([1 + step_of_one / 2, 1 + 1.5 * step_of_one, 1 + 0.51 * step_of_one, -1 - step_of_one / 2])
    kept = torch.tensor([1, 1 + 2 * step_of_one, 1 + step_of_one, -1])
    rows = [given[:, None].expand(4, width) for width in (config.kv_lora_rank, config.rope_head_dim)]
    for known in (
        *kv.append(config.num_layers, *rows),
        kv.append_index(config.num_layers, given[:, None].expand(4, config.index_head_dim)),
    ):
        assert known.dtype == torch.bfloat16 and torch.equal(known.float(), kept[:, None].expand_as(known))


def test_trim_and_clone_keep_the_positions(model):
    ids = ids_of("glm_moe_dsa_mtp")
    whole = make_kv_cache(model.config, 48)
    step(model, [(ids[:20], whole)])
    expected = step(model, [(ids[20:30], whole)])
    kv = make_kv_cache(model.config, 20)
    step(model, [(ids[:20], kv)])
    clones = [kv.clone(capacity=48), kv.clone(48)]
    kv.trim(3)
    step(model, [([9, 9, 9], kv)])
    assert not torch.equal(kv.latents[:, 3:6], clones[0].latents[:, 3:6])
    for clone in clones:
        assert {t.dtype for t in clone.tensors} == {KV_DTYPES[model.config.kv_dtype]}
        torch.testing.assert_close(step(model, [(ids[20:30], clone)]), expected, atol=1e-4, rtol=0)
        clone.trim(20)
        torch.testing.assert_close(step(model, [(ids[20:30], clone)]), expected, atol=1e-4, rtol=0)


# --- a whole model ----------------------------------------------------------------------------------------------------

NAMES = {"tiny": EMBEDDED_SNAPSHOT} | {name: FIXTURES / name for name in ("glm_moe_dsa", "glm_moe_dsa_fp8")}


@both
@pytest.mark.parametrize("name", [pytest.param("tiny", marks=pytest.mark.slow), *list(NAMES)[1:]])
def test_the_same_bits_in_any_batch(load, name, kv_dtype):
    loaded, ids = load(NAMES[name], KV_DTYPE=kv_dtype, THREADS=1), ids_of(name)[:300]
    need_kernels(loaded)
    model, count = loaded.model, len(ids)
    at_once = all_logits(model, ids)
    assert torch.equal(all_logits(model, ids, [1] * count), at_once)
    assert torch.equal(all_logits(model, ids, [2, 3, 17, 1, count - 23]), at_once)
    for chunk in (1, 5, 16):
        other = load(NAMES[name], cap=2, KV_DTYPE=kv_dtype, PREFILL_CHUNK=chunk, THREADS=2).model
        assert torch.equal(all_logits(other, ids), at_once), chunk
    caches = [make_kv_cache(model.config, count) for _ in range(3)]
    step(model, [(ids[:20], caches[0]), (ids[:7], caches[1])])
    together = step_all(model, [(ids[20:31], caches[0]), (ids[7:8], caches[1]), (ids[:19], caches[2])])
    assert torch.equal(together, torch.cat([at_once[20:31], at_once[7:8], at_once[:19]]))
    # Rounding shows, and is small: the last of 8 bits, of each number or of the largest of 64, in each of a few layers.
    plain = all_logits(load(NAMES[name]).model, ids)
    error = (at_once - plain).abs().max(-1).values / plain.std()
    assert 1e-5 < error.median() < {"bf16": 0.05, "int8": 0.1}[kv_dtype]


@both
@pytest.mark.parametrize("variant", ["avx512", "avx2", "portable"])
def test_the_same_bits_with_other_instructions(load, variant, kv_dtype):
    if not processor_flags().issuperset(VARIANTS[variant]):
        pytest.skip(f"this processor has no {variant}")
    ids = ids_of("glm_moe_dsa")
    loaded = load(NAMES["glm_moe_dsa"], KV_DTYPE=kv_dtype)
    need_kernels(loaded)
    expected = all_logits(loaded.model, ids)
    assert torch.equal(all_logits(load(NAMES["glm_moe_dsa"], KV_DTYPE=kv_dtype, KERNELS=variant).model, ids), expected)


@both
def test_the_reference_path_is_near(load, kv_dtype):
    ids = ids_of("tiny")[:300]
    loaded = load(NAMES["tiny"], KV_DTYPE=kv_dtype)
    need_kernels(loaded)
    native = all_logits(loaded.model, ids)
    torch_only = all_logits(load(NAMES["tiny"], KV_DTYPE=kv_dtype, KERNELS="reference").model, ids)
    assert not dispatch.is_native()
    error = (native - torch_only).abs().max(-1).values / torch_only.std()
    # A value that rounds to the other side of a half moves the logits about as much as rounding does (the test above),
    # and that is rare.
    assert error.median() < 1e-4 and error.max() < 0.03
    assert (native.argmax(-1) == torch_only.argmax(-1)).float().mean() > 0.99


# --- the command line -------------------------------------------------------------------------------------------------


@both
def test_a_greedy_run_has_a_notice_and_draft_tokens_change_no_text(run_colibri, tmp_path, kv_dtype):
    texts = set()
    for draft in (0, 4):
        process = run_colibri(
            KV_DTYPE=kv_dtype, PROMPT="Once upon a time", TEMP=0, NGEN=24, DRAFT=draft, REPORT=tmp_path / "r.json"
        )
        assert process.returncode == 0, process.stderr
        [line] = [line for line in process.stderr.decode().splitlines() if "KV_DTYPE" in line]
        assert line.startswith(f"[lossy] KV_DTYPE={kv_dtype}: ")
        assert read_json(tmp_path / "r.json")["lossy"] == [line.removeprefix("[lossy] ")]
        texts.add(process.stdout)
    assert len(texts) == 1 and texts.pop().strip()


def test_the_default_has_no_notice(load):
    for variables in ({}, {"KV_DTYPE": "f32"}, {"KV_DTYPE": ""}):
        loaded = load(EMBEDDED_SNAPSHOT, **variables)
        assert loaded.lossy == {} and make_kv_cache(loaded.config, 1).latents.dtype == torch.float32


@pytest.mark.parametrize("value", ["f16", "BF16", "1"])
def test_another_value_is_refused_in_a_line(run_colibri, value):
    process = run_colibri(KV_DTYPE=value, PROMPT="x")
    assert process.returncode == 2 and process.stdout == b""
    assert process.stderr.decode().splitlines()[-1].endswith(f"KV_DTYPE='{value}': expected f32, bf16 or int8")
    assert process.stderr.count(b"\n") == 1
