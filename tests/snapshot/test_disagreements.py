"""Two places that say the same thing and disagree: the one that counts in transformers 5.24 counts, with a notice."""

import json
import shutil

import pytest
import safetensors.torch
import torch

from snapshot.config_file import read_config
from snapshot.dense import DenseTensors
from snapshot.index import read_index
from tests.conftest import FIXTURES, read_json
from tests.snapshot.test_folders import notices

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def snapshot(tmp_path):
    """snapshot(name, tensors=None, **fields) -> a copy of a fixture with other tensors and keys of config.json."""

    def make(name="qwen3_moe", tensors=None, **fields):
        folder = tmp_path / name
        shutil.copytree(FIXTURES / name, folder, dirs_exist_ok=True)
        config = read_json(folder / "config.json") | fields
        (folder / "config.json").write_text(json.dumps(config))
        if tensors is not None:
            safetensors.torch.save_file(tensors, folder / "model.safetensors")
        return folder

    return make


def tensors_of(name="qwen3_moe"):
    return safetensors.torch.load_file(FIXTURES / name / "model.safetensors")


# --- tie_word_embeddings and the tensors ------------------------------------------------------------------------------


def ends(load, folder):
    """(embedding, head) of the loaded model, in float32."""
    weights = load(folder).model.weights
    return weights.embed.dequantize(), weights.lm_head.dequantize()


def test_a_head_that_differs_is_not_tied(snapshot, load):
    """tie_word_embeddings true beside an lm_head of its own: tied without a word, and the text was rubbish."""
    tensors = tensors_of()
    folder = snapshot(tie_word_embeddings=True)
    embed, head = ends(load, folder)
    assert torch.equal(embed, tensors[EMBED].float()) and torch.equal(head, tensors[HEAD].float())
    assert notices(folder) == [
        f"[config] tie_word_embeddings is true, but {HEAD} differs from {EMBED}: not tied",
    ]


def test_a_head_that_is_equal_is_tied(snapshot, load):
    """Also if one of them is stored in another dtype; the model holds one of them in memory."""
    tensors = tensors_of()
    for head in (tensors[EMBED].clone(), tensors[EMBED].float()):
        folder = snapshot(tensors=tensors | {HEAD: head}, tie_word_embeddings=True)
        weights = load(folder).model.weights
        assert weights.lm_head is weights.embed and notices(folder) == []


def test_a_head_alone_is_the_embedding_too(snapshot, load):
    """The flag with lm_head alone ties the other way round; it was "tensor model.embed_tokens.weight is missing"."""
    tensors = tensors_of()
    del tensors[EMBED]
    folder = snapshot(tensors=tensors, tie_word_embeddings=True)
    embed, head = ends(load, folder)
    assert torch.equal(embed, tensors[HEAD].float()) and torch.equal(head, embed)


def test_without_the_flag_a_missing_head_is_missing(snapshot, load):
    """transformers fills it with random numbers."""
    from errors import Refused

    tensors = tensors_of()
    del tensors[HEAD]
    with pytest.raises(Refused, match=r"tensor lm_head\.weight is missing"):
        load(snapshot(tensors=tensors))


@pytest.mark.parametrize("which", ["differing", "equal", "head alone"])
def test_a_container_is_tied_as_its_source(snapshot, load, tmp_path, which):
    """Quantized apart, equal matrices would differ and untie: the copy is left out."""
    from scripts.convert import main

    tensors = tensors_of()
    if which == "equal":
        tensors[HEAD] = tensors[EMBED].clone()
    if which == "head alone":
        del tensors[EMBED]
    folder = snapshot(tensors=tensors, tie_word_embeddings=True)
    assert main([str(folder), str(tmp_path / "out"), "--verify"]) == 0
    source, made = load(folder).model.weights, load(tmp_path / "out").model.weights
    assert (source.lm_head is source.embed) == (made.lm_head is made.embed) == (which != "differing")
    torch.testing.assert_close(made.lm_head.dequantize(), source.lm_head.dequantize(), atol=0.02, rtol=0)


# --- keys of config.json ----------------------------------------------------------------------------------------------


def config_of(folder):
    config, _ = read_config(folder)
    return config, [line.removeprefix("[config] config.json: ") for line in config.notices]


YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}


def test_rope_scaling_counts_before_rope_parameters(snapshot):
    """Both are there in files that a tool of another version has saved again; the newer one was taken, silently. What
    rope_scaling lacks comes from the top level, not from rope_parameters."""
    config, lines = config_of(snapshot(rope_scaling=YARN, rope_theta=5e5))
    alone, none = config_of(snapshot(rope_scaling=YARN, rope_theta=5e5, rope_parameters=None))
    assert config.rope == alone.rope and none == []
    assert len(lines) == 1 and lines[0].startswith("rope_scaling (") and "counts, not rope_parameters (" in lines[0]
    config, lines = config_of(snapshot(rope_scaling={}))
    assert config.rope == config_of(snapshot(rope_scaling=None))[0].rope and lines == []


def test_the_inner_rope_theta_and_partial_rotary_factor_count(snapshot):
    inner = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    config, lines = config_of(snapshot("glm4_moe", rope_parameters=inner, rope_theta=5e5, partial_rotary_factor=0.5))
    assert config.rope_head_dim == 4 and config.rope.frequencies[1] == pytest.approx(1e4**-0.5)
    assert lines == [
        "rope_parameters.partial_rotary_factor (0.25) counts, not that of the top level (0.5)",
        "rope_parameters.rope_theta (10000.0) counts, not rope_theta of the top level (500000.0)",
    ]


def test_rope_type_counts_before_type(snapshot):
    _, lines = config_of(snapshot(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "type": "yarn"}))
    assert lines == ["rope_parameters.rope_type ('default') counts, not type ('yarn')"]


@pytest.mark.parametrize(
    ("name", "fields", "line"),
    [
        ("gpt_oss", {"experts_per_token": 3}, "num_experts_per_tok (2) counts, not experts_per_token (3)"),
        (
            "glm_moe_dsa",
            {"mlp_layer_types": ["dense", "dense", "dense", "sparse", "sparse"], "first_k_dense_replace": 1},
            "mlp_layer_types (['dense', 'dense', 'dense', 'sparse', 'sparse']) counts, not first_k_dense_replace (1)",
        ),
        (
            "glm_moe_dsa",
            {"indexer_types": ["full", "full", "shared", "full", "shared"], "index_topk_pattern": "FSSSS"},
            "indexer_types (('full', 'full', 'shared', 'full', 'shared')) counts, not index_topk_pattern ('FSSSS')",
        ),
        (
            "qwen3_moe",
            {"text_config": {"hidden_size": 7, "vocab_size": 512, "x": 1}},
            "the top level counts, not text_config, which differs in hidden_size",
        ),
        ("qwen3_moe", {"eos_token_id": [511, 512]}, "eos_token_id 512 is not in the vocabulary of 512: no answer ends"),
        ("qwen3_moe", {"eos_token_id": -1}, "eos_token_id -1 is not in the vocabulary of 512: no answer ends with it"),
    ],
)
def test_the_key_that_counts_is_named(snapshot, name, fields, line):
    _, lines = config_of(snapshot(name, **fields))
    assert len(lines) == 1 and lines[0].startswith(line)


@pytest.mark.parametrize(
    "fields",
    [
        {"pad_token_id": 512},
        {"pad_token_id": -1},
        {"dtype": "float16", "torch_dtype": "bfloat16"},
        {"architectures": ["X"]},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        {"text_config": {"hidden_size": 64}},
        {"experts_per_token": 2, "num_mtp_layers": 3},
    ],
)
def test_keys_without_a_say(snapshot, fields):
    """A pad token one above the vocabulary, as fine-tunes have it; the dtype, which the tensors tell; equal values."""
    config, lines = config_of(snapshot(**fields))
    assert lines == [] and config == config_of(snapshot())[0]


def test_names_of_the_number_of_experts(snapshot):
    """transformers lets the last one of the file count, another program the first: refused."""
    from errors import Refused

    with pytest.raises(Refused, match="num_experts is 4, but num_local_experts is 8; they mean the same"):
        read_config(snapshot(num_experts=4))


def test_end_ids_of_all_files_end_an_answer(snapshot):
    folder = snapshot(eos_token_id=5)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 900], "pad_token_id": 900}))
    config, _ = read_config(folder)
    assert config.stop_ids == (5, 7)
    assert config.notices == (
        "[config] generation_config.json: eos_token_id 900 is not in the vocabulary of 512: no answer ends with it",
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 600}, r"shape \[512, 64\], config.json asks for \[600, 64\]"),
        ({"vocab_size": 500, "eos_token_id": 3}, r"shape \[512, 64\], config.json asks for \[500, 64\]"),
        ({"num_local_experts": 6}, r"mlp\.gate\.weight has shape \[8, 64\], config.json asks for \[6, 64\]"),
        ({"num_hidden_layers": 3}, "holds tensors of layer 3, config.json asks for 3 layers"),
        ({"num_hidden_layers": 5}, "layer 4 has no tensors"),
        ({"head_dim": 8}, r"q_proj\.weight has shape \[64, 64\], config.json asks for \[32, 64\]"),
        ({"mlp_only_layers": []}, r"tensor model\.layers\.1\.mlp\.gate\.weight is missing"),
        ({"attention_bias": True}, r"tensor model\.layers\.0\.self_attn\.q_proj\.bias is missing"),
    ],
)
def test_tensors_that_contradict_config_json_are_refused(snapshot, fields, message):
    """transformers refuses other shapes, and fills what is missing with random numbers."""
    from errors import Refused

    folder = snapshot(**fields)
    config, family = read_config(folder)
    with pytest.raises(Refused, match=message):
        DenseTensors(config, family, read_index(folder))
