"""Containers of the C engine, built here from their description and not by our own writer."""

import json
import math

import numpy as np
import pytest
import safetensors.torch
import torch

from errors import Refused
from kernels.formats import FORMATS, GROUPS
from snapshot.dense import read_stored_weight
from snapshot.formats import find_stored_weight
from snapshot.index import FORMATS_KEY, read_index
from snapshot.reader import FileReader
from tests.conftest import FIXTURES, reference
from tests.forward.test_forward import all_logits

NAME = "model.layers.0.self_attn.o_proj.weight"


def random(rows, columns, seed=7):
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


# --- the C engine's rules: value by value, with numpy -----------------------------------------------------------------


def encode(matrix, bits, group):
    """-> (codes int [O, I], scales [O, groups], values): scale = max / qmax, round half to even, floor 1e-8."""
    rows, columns = matrix.shape
    codes, values = np.zeros((rows, columns), int), np.zeros_like(matrix)
    scales = np.zeros((rows, math.ceil(columns / group)), np.float32)
    high = 2 ** (bits - 1) - 1
    for row in range(rows):
        for at in range(0, columns, group):
            part = matrix[row, at : at + group]
            scale = scales[row, at // group] = max(np.float32(abs(part).max() / np.float32(high)), np.float32(1e-8))
            codes[row, at : at + group] = np.clip(np.rint(part / scale), -high - 1, high)
            values[row, at : at + group] = codes[row, at : at + group].astype(np.float32) * scale
    return codes, scales, values


def row_bytes(codes, bits):
    """One row of codes -> its bytes."""
    if bits == 8:
        return [int(code) & 255 for code in codes]
    if bits == 3:
        out = []
        for at in range(0, len(codes), 64):
            group = [int(code) + 4 for code in codes[at : at + 64]]
            group += [4] * (64 - len(group))
            out += [sum((group[i + k] & 3) << 2 * k for k in range(4)) for i in range(0, 64, 4)]
            out += [sum((group[i + k] >> 2) << k for k in range(8)) for i in range(0, 64, 8)]
        return out
    per_byte, offset = 8 // bits, 2 ** (bits - 1)
    out = []
    for at in range(0, len(codes), per_byte):
        out.append(sum((int(code) + offset) << bits * k for k, code in enumerate(codes[at : at + per_byte])))
    return out


def c_tensors(name, matrix, bits, group=None, scale_dtype=torch.float32):
    """-> (a matrix as the C engine's converter writes it, flat; its values)."""
    codes, scales, values = encode(matrix, bits, group or matrix.shape[1])
    data = torch.tensor([byte for row in codes for byte in row_bytes(row, bits)], dtype=torch.uint8)
    tensors = {name: data, name + ".qs": torch.from_numpy(scales.flatten()).to(scale_dtype)}
    if scale_dtype != torch.float32:
        scales = torch.from_numpy(scales).to(scale_dtype).float().repeat_interleave(group, dim=1)
        values = codes.astype(np.float32) * scales[:, : matrix.shape[1]].numpy()
    return tensors, torch.from_numpy(values)


def read(folder, shape, name=NAME):
    """-> (format, values) of a matrix, as the engine reads it."""
    reader = FileReader()
    try:
        stored = find_stored_weight(read_index(folder), name, shape)
        return stored.format.name, read_stored_weight(reader, stored).dequantize()
    finally:
        reader.close()


@pytest.mark.parametrize("columns", [192, 191, 65, 640])
@pytest.mark.parametrize(
    ("bits", "group"), [(8, None), (4, None), (2, None), (3, 64), (8, 64), (2, 64), *((4, group) for group in GROUPS)]
)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16])
def test_formats_are_inferred_from_byte_counts(tmp_path, bits, group, columns, scale_dtype):
    """Field case F14: one matrix in every format, flat, no format declared; values exactly by the rules."""
    tensors, values = c_tensors(NAME, random(5, columns), bits, group or columns, scale_dtype)
    safetensors.torch.save_file(tensors, tmp_path / "out-00000.safetensors")
    found, values_read = read(tmp_path, (5, columns))
    groups = math.ceil(columns / group) if group else 1
    if groups == 1:
        inferred = columns
    else:  # the first size of a group that gives as many scales, as by the C engine
        inferred = next(g for g in (GROUPS if bits == 4 else [group]) if math.ceil(columns / g) == groups)
    assert found == (f"int{bits}-row" if groups == 1 else f"int{bits}-g{inferred}")
    if inferred == (group or columns) or groups == 1:
        assert torch.equal(values_read, values)


def test_a_declared_format_resolves_ambiguous_byte_counts(tmp_path):
    """160 columns in groups of 128 have two scales a row, and so have they in groups of 96."""
    tensors, values = c_tensors(NAME, random(5, 160), 4, 128)
    safetensors.torch.save_file(tensors, tmp_path / "out-00000.safetensors")
    assert read(tmp_path, (5, 160))[0] == "int4-g96"
    for key in (NAME, "model.layers.0.", "model.layers.0.self_attn."):
        metadata = {FORMATS_KEY: json.dumps({key: "int4-g128", "model.": "int4-g96"})}
        safetensors.torch.save_file(tensors, tmp_path / "out-00000.safetensors", metadata)
        found, values_read = read(tmp_path, (5, 160))
        assert found == "int4-g128" and torch.equal(values_read, values)


def test_fp8_as_published_and_in_a_container(tmp_path):
    """Raw e4m3 bytes, a scale for each block of 128 x 128; where bytes fit int8 by row too, they are int8 by row."""
    matrix = torch.from_numpy(random(300, 160)).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2) + 0.5
    expected = matrix.float() * scales.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :160]
    safetensors.torch.save_file({NAME: matrix, NAME + "_scale_inv": scales}, tmp_path / "a.safetensors")
    found, values_read = read(tmp_path, (300, 160))
    assert found == "fp8-b128" and torch.equal(values_read, expected)
    flat = {NAME: matrix.view(torch.uint8).flatten(), NAME + ".qs": scales.flatten()}
    safetensors.torch.save_file(flat, tmp_path / "a.safetensors")
    found, values_read = read(tmp_path, (300, 160))
    assert found == "fp8-b128" and torch.equal(values_read, expected)
    one = {NAME: matrix[:1, :128].contiguous().view(torch.uint8).flatten(), NAME + ".qs": torch.ones(1)}
    safetensors.torch.save_file(one, tmp_path / "a.safetensors")
    assert read(tmp_path, (1, 128))[0] == "int8-row"
    safetensors.torch.save_file(one, tmp_path / "a.safetensors", {FORMATS_KEY: json.dumps({NAME: "fp8-b128"})})
    assert read(tmp_path, (1, 128))[0] == "fp8-b128"


U8, F32 = torch.uint8, torch.float32
BAD = [
    ({NAME: (5 * 96, U8), ".qs": (4, F32)}, {}, "has the bytes of 4 bits a weight but 4 scales"),
    ({NAME: (5 * 96, U8), ".qs": (10, F32)}, {}, None),
    ({NAME: (5 * 192, U8), ".qs": (10, F32)}, {}, "has the bytes of 8 bits a weight but 10 scales"),
    ({NAME: (5 * 95, U8), ".qs": (5, F32)}, {}, "has 475 bytes, which fit no format.*5 x 192 weights"),
    ({NAME: (5 * 96, U8), ".qs": (5, torch.bfloat16)}, {}, "scales of dtype BF16, int4-row goes with F32 or F16"),
    ({NAME: (5 * 96, torch.int16), ".qs": (5, F32)}, {}, "dtype I16, expected U8"),
    ({NAME: (5 * 96, U8)}, {}, "has dtype U8, expected BF16, F16, F32"),
    ({NAME: (5 * 96, U8), ".qs": (5, F32)}, {NAME: "int5-row"}, "declared as 'int5-row', which is no packed format"),
    ({NAME: (5 * 96, U8), ".qs": (5, F32)}, {NAME: "bf16"}, "declared as 'bf16', which is no packed format"),
    ({NAME: (5 * 96, U8), ".qs": (5, F32)}, {NAME: "int8-row"}, "declared as int8-row and has 480 bytes and 5 scales"),
    ({NAME: ((96, 5), U8), ".qs": (5, F32)}, {}, r"has shape \[96, 5\]"),
    ({NAME: (5 * 192, U8), ".qs": (2, torch.float16)}, {NAME: "fp8-b128"}, "dtype F16, fp8-b128 goes with F32;"),
]


@pytest.mark.parametrize(("tensors", "declared", "message"), BAD)
def test_a_tensor_that_fits_no_format_is_refused_by_name(tmp_path, tensors, declared, message):
    made = {
        NAME if key == NAME else NAME + key: torch.ones(size, dtype=dtype) for key, (size, dtype) in tensors.items()
    }
    safetensors.torch.save_file(
        made, tmp_path / "a.safetensors", {FORMATS_KEY: json.dumps(declared)} if declared else None
    )
    if message is None:
        assert read(tmp_path, (5, 192))[0] == "int4-g96"
        return
    with pytest.raises(Refused, match=message) as caught:
        read(tmp_path, (5, 192))
    assert NAME in str(caught.value) and "a.safetensors" in str(caught.value)


@pytest.mark.parametrize(("columns", "data", "scales", "message"), [
    (512, 5 * 512 // 256 * 98, torch.ones(1), "E8 lattice"),
    (256, 300 * 256, torch.ones(6, dtype=torch.uint8), "UE8M0"),
])  # fmt: skip
def test_known_unsupported_formats_are_named(tmp_path, columns, data, scales, message):
    rows = 300 if columns == 256 else 5
    tensors = {NAME: torch.zeros(data, dtype=torch.uint8), NAME + ".qs": scales}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(Refused, match=message):
        read(tmp_path, (rows, columns))


@pytest.mark.parametrize("scales", [torch.zeros(2, 1, dtype=torch.uint8), None, torch.ones(1, 1)])
def test_fp8_with_missing_or_wrong_scales_is_refused(tmp_path, scales):
    tensors = {NAME: torch.zeros(160, 100).to(torch.float8_e4m3fn)}
    tensors |= {} if scales is None else {NAME + "_scale_inv": scales}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors")
    message = (
        r"_scale_inv are missing"
        if scales is None
        else "UE8M0"
        if scales.dtype == U8
        else "a scale for the whole matrix"
    )
    with pytest.raises(Refused, match=message):
        read(tmp_path, (160, 100))


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}', '{"a": "x", "a": "y"}', "\ud800"])
def test_declared_formats_that_are_no_table_are_refused(tmp_path, text):
    header = {"__metadata__": {FORMATS_KEY: text}, NAME: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    data = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(len(data).to_bytes(8, "little") + data + bytes(4))
    with pytest.raises(Refused, match=rf"a\.safetensors: {FORMATS_KEY} of the metadata"):
        read_index(tmp_path)


# --- whole models -----------------------------------------------------------------------------------------------------


def c_container(source, out, group):
    """A container of a fixture by the C engine's rules: experts and dense int4, embedding and head int8, MTP int8, in
    files of its own naming -> the same model in F32."""
    tensors = safetensors.torch.load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    mtp = f"model.layers.{config['num_hidden_layers']}."
    files, values = {"out-00000": {}, "out-mtp-00000": {}}, {}
    for name, tensor in tensors.items():
        file = files["out-mtp-00000" if name.startswith(mtp) else "out-00000"]
        plain = tensor.dim() == 1 or name.endswith("mlp.gate.weight")
        values[name] = file[name] = tensor.float()
        if not plain:
            bits = 8 if name.startswith(mtp) or "embed_tokens" in name or "lm_head" in name else 4
            packed, values[name] = c_tensors(name, tensor.float().numpy(), bits, group if bits == 4 else None)
            file |= packed
    out.mkdir()
    for file, content in files.items():
        if content:
            safetensors.torch.save_file(content, out / f"{file}.safetensors")
    (out / "config.json").write_text(json.dumps(config))
    dequantized = out.with_name(out.name + "-f32")
    dequantized.mkdir()
    safetensors.torch.save_file(values, dequantized / "model.safetensors")
    (dequantized / "config.json").write_text(json.dumps(config))
    return dequantized


@pytest.mark.parametrize("name", ["glm_moe_dsa", "glm_moe_dsa_mtp"])
@pytest.mark.parametrize("group", [16, None])
@pytest.mark.parametrize("cap", [1, 0])
def test_a_container_of_the_c_engine_equals_its_dequantized_model(tmp_path, load, name, group, cap):
    dequantized = c_container(FIXTURES / name, tmp_path / "out", group)
    ids = reference(name)[0]["seq"]
    loaded = load(tmp_path / "out", cap=cap, EXACT=1)
    assert {fmt.name for fmt in loaded.disk.formats()} == {"int4-g16" if group else "int4-row"}
    logits = all_logits(loaded.model, ids)
    torch.testing.assert_close(logits, all_logits(load(dequantized).model, ids), atol=1e-5, rtol=0)
    rounded = all_logits(load(tmp_path / "out", cap=cap).model, ids)
    assert 1e-4 < (rounded - logits)[0].abs().max() < 1  # later ones may go to other experts: these models are random


def test_arguments_without_effect_on_packed_weights_give_a_notice(tmp_path, load):
    c_container(FIXTURES / "glm_moe_dsa", tmp_path / "out", 16)
    loaded = load(tmp_path / "out", expert_bits=8, dense_bits=2)
    notices = [line for line in loaded.notices if line.startswith("[format]")]
    assert notices == [
        "[format] experts int4-g16 | dense int4-g16 | embedding int8-row | head int8-row | "
        "activations 8 bits in groups of 64",
        "[format] expert_bits 8 has no effect on weights that are stored as int4-g16",
        "[format] dense_bits 2 has no effect on weights that are stored as int4-g16",
    ]
    assert loaded.lossy == {}


def test_the_fp8_fixture_is_quantized_at_load(load):
    """FP8 is a float format: it can be quantized at load like BF16."""
    loaded = load(FIXTURES / "glm_moe_dsa_fp8", expert_bits=8, dense_bits=8, EXACT=1)
    assert len(loaded.lossy) == 2
    ref, tensors = reference("glm_moe_dsa_fp8")
    error = (all_logits(loaded.model, ref["seq"]) - tensors["logits"]).std() / tensors["logits"].std()
    assert 1e-4 < error < 0.15


def test_an_expert_of_several_formats(tmp_path, load):
    """Per-tensor mixtures: int8 down in one expert, BF16 gate in another; expert slots fit the largest."""
    dequantized = c_container(FIXTURES / "glm_moe_dsa", tmp_path / "out", 16)
    tensors = safetensors.torch.load_file(tmp_path / "out" / "out-00000.safetensors")
    original = safetensors.torch.load_file(FIXTURES / "glm_moe_dsa" / "model.safetensors")
    values = safetensors.torch.load_file(dequantized / "model.safetensors")
    down, gate = "model.layers.2.mlp.experts.3.down_proj.weight", "model.layers.2.mlp.experts.5.gate_proj.weight"
    packed, values[down] = c_tensors(down, original[down].float().numpy(), 8)
    tensors |= packed
    tensors[gate], values[gate] = original[gate], original[gate].float()
    del tensors[gate + ".qs"]
    safetensors.torch.save_file(tensors, tmp_path / "out" / "out-00000.safetensors")
    safetensors.torch.save_file(values, dequantized / "model.safetensors")
    ids = reference("glm_moe_dsa")[0]["seq"]
    loaded = load(tmp_path / "out", cap=2, EXACT=1)
    assert {fmt.name for fmt in loaded.disk.formats()} == {"int4-g16", "int8-row", "bf16"}
    expected = all_logits(load(dequantized).model, ids)
    torch.testing.assert_close(all_logits(loaded.model, ids), expected, atol=1e-5, rtol=0)


def test_format_names_are_unique():
    assert len({fmt.name for fmt in FORMATS.values()}) == len(FORMATS) == 3 + 1 + 1 + 3 + 3 * len(GROUPS) + 1
