"""config.json of every model type: what is refused by name, any value under any key, older spellings."""

import json
import math
import shutil
from importlib import import_module

import pytest

from errors import Refused
from snapshot.config_fields import ConfigFields
from snapshot.config_file import read_config
from tests.conftest import FAMILIES, FIXTURES, read_json

KNOWN = (
    "deepseek_v2, deepseek_v3, deepseek_v32, glm4_moe, glm4_moe_lite, glm_moe_dsa, gpt_oss, mixtral, olmoe, qwen3_moe"
)
ROPE = {"rope_type": "longrope", "rope_theta": 1e4}
REFUSED = [
    *(
        (name, {"model_type": "qwen2_moe"}, f"model_type is 'qwen2_moe', this engine knows {KNOWN}")
        for name in FAMILIES
    ),
    *((name, {"hidden_act": "gelu"}, "hidden_act is 'gelu', this engine computes only 'silu'") for name in FAMILIES),
    *(
        (name, {"rope_parameters": ROPE}, "rope_type is 'longrope', this engine computes only 'default' or 'yarn'")
        for name in FAMILIES
    ),
    *(
        (name, {"scoring_func": "softmax"}, "scoring_func is 'softmax', this engine computes only 'sigmoid'")
        for name in ("glm4_moe", "deepseek_v3", "deepseek_v32", "glm4_moe_lite")
    ),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy', this engine computes only 'noaux_tc'"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid', this engine computes only 'softmax'"),
    ("deepseek_v2", {"n_group": 8, "topk_method": "group_limited_greedy"}, "n_group is 8 with topk_method"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0, this engine computes only null"),
    ("mixtral", {"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide 4 heads"),
    ("mixtral", {"head_dim": 15}, "head_dim is 15"),
    ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 2}}, "partial_rotary_factor is 2, expected a number"),
    ("deepseek_v3_yarn", {"rope_parameters": {"rope_type": "yarn", "factor": "big"}}, "factor is 'big'"),
    ("deepseek_v3_yarn", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1}}, "rope_theta is 1"),
    ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types must be a list of 4 entries"),
    ("gpt_oss", {"intermediate_size": 48}, "intermediate_size is 48, expected a multiple of 32"),
    (
        "gpt_oss",
        {"quantization_config": {"quant_method": "awq"}},
        "is 'awq': the weights are quantized with AWQ, this engine reads fp8 and mxfp4; take the original",
    ),
    ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
]


@pytest.mark.parametrize(("name", "fields", "message"), REFUSED)
def test_what_is_not_computed_is_refused_by_name(tmp_path, name, fields, message):
    config = read_json(FIXTURES / name / "config.json") | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refused) as caught:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value) and message in str(caught.value)


ODD = [None, True, 0, 1, -1, 3, 2**63, 1.5, 1e308, float("nan"), "", "8", "yarn", [], [[]], [1] * 4, {}, {"": {}}]


@pytest.mark.parametrize("name", FAMILIES)
def test_any_value_under_any_key_is_accepted_or_refused(name):
    """Every key that the family asks for, and every key of the rope: a ModelConfig, or one line that names the key."""
    original, asked = read_json(FIXTURES / name / "config.json"), set()

    class RecordingDict(dict):
        def get(self, key, *default):
            asked.add(key)
            return super().get(key, *default)

    family = import_module(f"snapshot.families.{original['model_type']}")
    family.parse_config(ConfigFields(RecordingDict(original), "config.json"))
    rope, numbers = original["rope_parameters"], 0
    yarn = ("type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    yarn += ("attention_factor", "truncate", "rope_theta", "rope_type", "partial_rotary_factor")
    changes = [{key: value} for key in sorted(asked - {"model_type"}) for value in ODD]
    changes += [{"rope_parameters": rope | {key: value}} for key in yarn for value in ODD]
    for fields in changes:
        try:
            config = family.parse_config(ConfigFields(original | fields, "config.json"))
            assert len(config.rope.frequencies) == config.rope_head_dim // 2
            numbers += 1
        except Refused as error:
            assert str(error).startswith("config.json: ") and "\n" not in str(error)
    assert 50 < numbers < len(changes) - 50


@pytest.mark.parametrize("name", FAMILIES)
def test_the_older_spelling_of_rope(tmp_path, name):
    """rope_theta and partial_rotary_factor at the top, rope_scaling with `type` or null, as published configs have."""
    shutil.copytree(FIXTURES / name, tmp_path, dirs_exist_ok=True)
    config, expected = read_json(tmp_path / "config.json"), read_config(tmp_path)[0]
    rope = config.pop("rope_parameters")
    config |= {key: rope.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else rope | {"type": kind}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path)[0] == expected


def test_defaults_of_gpt_oss(tmp_path):
    """Every other layer has a sliding window of 128, and yarn stretches 4,096 positions by 32."""
    config = read_json(FIXTURES / "gpt_oss" / "config.json")
    for key in ("layer_types", "sliding_window", "rope_parameters", "swiglu_limit", "swiglu_alpha", "head_dim"):
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    c, _ = read_config(tmp_path)
    assert c.sliding_windows == (128, 0, 128, 0) and (c.swiglu_limit, c.swiglu_alpha, c.qk_head_dim) == (7.0, 1.702, 64)
    assert c.rope.factor == pytest.approx(0.1 * math.log(32) + 1)
    # The quickest pair turns more than 32 times over 4,096 positions and stays, the slowest less than once.
    assert c.rope.frequencies[0] == 1 and c.rope.frequencies[-1] == pytest.approx(150000.0 ** (-62 / 64) / 32)
