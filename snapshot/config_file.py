"""config.json -> ModelConfig, checked, and Family. families/<model_type>.py interprets the keys of each model type."""

import importlib
import os
import pkgutil
from dataclasses import replace
from pathlib import Path

from errors import Refused, show
from snapshot import families
from snapshot.config import ModelConfig
from snapshot.config_fields import ConfigFields
from snapshot.config_parts import EXPERT_NAMES
from snapshot.family import Family
from snapshot.folder import list_names
from snapshot.foreign import ADVICE, describe_method
from snapshot.reader import read_json_object

MAX_ROUTED_EXPERTS = 1 << 17  # the engine keeps a few hundred bytes for each; GLM-5.2 has 19,200


def read_config(folder: Path) -> tuple[ModelConfig, Family]:
    """Read config.json and generation_config.json of a snapshot folder."""
    path, adapter, generation = (folder / f"{name}config.json" for name in ("", "adapter_", "generation_"))
    if os.path.lexists(adapter):
        problem = "the folder holds a LoRA adapter, which this engine does not apply"
        raise Refused(f"{adapter}: {problem}; merge it into its model, or move it away for the model without it")
    config, family = parse_model_config(ConfigFields(read_json_object(path), path))
    if os.path.lexists(generation):  # a dangling link is a broken download, not an absent file
        fields = ConfigFields(read_json_object(generation), generation)
        stop_ids = config.stop_ids + fields.token_ids("eos_token_id", config.vocab_size)
        notices = *config.notices, *fields.notices
        config = replace(config, stop_ids=tuple(dict.fromkeys(stop_ids)), notices=notices)
    return config, family


def parse_model_config(fields: ConfigFields) -> tuple[ModelConfig, Family]:
    """Fields of a config.json -> the config and its family. Refuses an unknown model_type."""
    known = sorted(module.name for module in pkgutil.iter_modules(families.__path__))
    model_type = fields.get("model_type")
    if model_type not in known:
        fields.reject("model_type", f"is {show(model_type)}, this engine knows {', '.join(known)}")
    check_quantization(fields)
    module = importlib.import_module(f"snapshot.families.{model_type}")
    config = module.parse_config(fields)
    num_sparse = len(config.sparse_layers)
    if config.num_experts * num_sparse > MAX_ROUTED_EXPERTS:
        problem = f"makes {config.num_experts} experts in {num_sparse} layers, above {MAX_ROUTED_EXPERTS} in all"
        fields.reject(fields.first_present(*EXPERT_NAMES), problem)
    check_second_names(fields, config)
    return replace(config, notices=tuple(fields.notices)), getattr(module, "FAMILY", Family())


def check_second_names(fields: ConfigFields, config: ModelConfig) -> None:
    """Notices of keys that are not read, as in transformers, and say something else than those that are."""
    fields.prefer(
        "num_experts_per_tok", config.num_active_experts, "experts_per_token", fields.find("experts_per_token")
    )
    inner = fields.nested("text_config").values
    differing = [key for key in inner if fields.find(key) not in (None, inner[key])]
    if differing:
        fields.say(f"the top level counts, not text_config, which differs in {list_names(sorted(differing))}")


def check_quantization(fields: ConfigFields) -> None:
    """Refuse a quantization_config other than FP8 or MXFP4. Dtypes of tensors decide: containers keep the key."""
    if fields.find("quantization_config") is None:
        return
    quantization = fields.nested("quantization_config")
    method = quantization.get("quant_method", None)
    if method not in (None, "fp8", "mxfp4"):
        problem = f"is {show(method)}: the weights are quantized with {describe_method(method)}"
        quantization.reject("quant_method", f"{problem}, this engine reads fp8 and mxfp4; {ADVICE}")
    if method == "fp8":
        quantization.require("fmt", "e4m3")
        quantization.require("weight_block_size", [128, 128])
