"""With C kernels a token's logits are the same bits in any batch: at once, one at a time, in prefill chunks, beside
other sequences, with more threads, from a smaller expert cache."""

import pytest
import torch

from forward.kv_cache import make_kv_cache
from forward.step import step, step_all
from kernels import dispatch
from kernels.build import VARIANTS
from kernels.processor import processor_flags
from scripts import convert
from tests.conftest import FIXTURES, ROOT, read_json, reference
from tests.forward.test_forward import all_logits

TINY = ROOT / "models" / "tiny"
BITS = {
    "stored": None,
    "int4": (),
    "int4_row": ("--group", 0),
    "int8": ("--experts", 8, "--dense", 8),
    "int3": ("--experts", 3),
    "int2_g16": ("--experts", 2, "--dense", 4, "--group", 16),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(snapshot, format) -> a folder."""
    made = {}

    def folder(name, bits):
        source = TINY if name == "tiny" else FIXTURES / name
        if BITS[bits] is None:
            return source
        if (name, bits) not in made:
            made[name, bits] = tmp_path_factory.mktemp("bits") / "out"
            assert convert.main([str(source), str(made[name, bits]), *map(str, BITS[bits])]) == 0
        return made[name, bits]

    return folder


def ids_of(name):
    if name != "tiny":
        return reference(name)[0]["seq"]
    return read_json(TINY / "ref_glm.json")["full_ids"] * 5  # 350 positions: beyond index_topk


def need_kernels(loaded):
    """Skip without a compiler; kernels that do not compile are a failure."""
    if "no C compiler was found" in loaded.kernels:
        pytest.skip(loaded.kernels)
    assert dispatch.is_native(), loaded.kernels


SLOW = {("tiny", bits) for bits in BITS}  # the small fixtures have these formats too
CASES = [
    pytest.param(name, bits, id=f"{name}-{bits}", marks=[pytest.mark.slow] if (name, bits) in SLOW else [])
    for name in ("tiny", "glm_moe_dsa", "glm_moe_dsa_groups", "glm_moe_dsa_fp8")
    for bits in BITS
]


@pytest.mark.parametrize(("name", "bits"), CASES)
def test_the_same_bits_in_any_batch(folders, load, name, bits):
    loaded, ids = load(folders(name, bits), THREADS=1), ids_of(name)
    need_kernels(loaded)
    model = loaded.model
    at_once = all_logits(model, ids)
    assert torch.equal(all_logits(model, ids, [1] * len(ids)), at_once)
    lengths = [2, 3, 17, 1, 8]
    assert torch.equal(all_logits(model, ids, [*lengths, len(ids) - sum(lengths)]), at_once)
    for chunk in (1, 5, 16):
        other = load(folders(name, bits), cap=2, PREFILL_CHUNK=chunk, THREADS=2).model
        assert torch.equal(all_logits(other, ids), at_once), chunk
    # Three sequences in one batch, at different positions of the same text.
    caches = [make_kv_cache(model.config, len(ids)) for _ in range(3)]
    step(model, [(ids[:20], caches[0]), (ids[:7], caches[1])])
    together = step_all(model, [(ids[20:31], caches[0]), (ids[7:8], caches[1]), (ids[:19], caches[2])])
    assert torch.equal(together, torch.cat([at_once[20:31], at_once[7:8], at_once[:19]]))


@pytest.mark.parametrize("bits", ["int4", "int8"])
def test_the_same_bits_with_exact_activations(folders, load, bits):
    loaded, ids = load(folders("tiny", bits), EXACT=1), ids_of("tiny")[:60]
    need_kernels(loaded)
    model = loaded.model
    assert torch.equal(all_logits(model, ids, [1] * 20 + [40]), all_logits(model, ids))


@pytest.mark.parametrize("name", ["avx512vnni", "avx512", "avxvnni", "avx2", "portable"])
def test_the_same_bits_with_other_instructions(folders, load, name):
    ids = ids_of("tiny")[:70]
    loaded = load(folders("tiny", "int4"))
    need_kernels(loaded)
    expected = all_logits(loaded.model, ids)
    if not processor_flags().issuperset(VARIANTS[name]):
        pytest.skip(f"this processor has no {name}")
    other = load(folders("tiny", "int4"), KERNELS=name)
    assert other.kernels.startswith(f"[kernels] {name}")
    assert torch.equal(all_logits(other.model, ids), expected)


@pytest.mark.parametrize("bits", BITS)
def test_the_reference_path_is_near(folders, load, bits):
    """The same model in plain torch."""
    ids = ids_of("tiny")[:64]
    native = all_logits(load(folders("tiny", bits)).model, ids)
    torch_only = all_logits(load(folders("tiny", bits), KERNELS="reference").model, ids)
    assert not dispatch.is_native()
    error = (native - torch_only).abs().max(-1).values / torch_only.std()
    # An activation that rounds to the other side of a half moves the logits about as much as quantizing it does.
    assert error.median() < (1e-5 if bits == "stored" else 0.06)
    assert (native.argmax(-1) == torch_only.argmax(-1)).float().mean() > (0.999 if bits == "stored" else 0.85)
