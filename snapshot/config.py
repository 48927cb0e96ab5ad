"""config.json -> ModelConfig, frozen and checked. What a model type means stands in families/<model_type>.py."""

import importlib
import json
import os
import pkgutil
from dataclasses import dataclass, replace

from errors import Refused, shorten, show
from snapshot import families
from snapshot.reader import read_file
from snapshot.rope import Rope


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The numbers of one model, by the field's names. Widths are columns, counts are per layer."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    stop_ids: tuple[int, ...]
    text_prefix: tuple[str, ...] = ()  # special tokens that begin every text of this family
    num_mtp_layers: int = 0
    # attention: "mla" keeps a latent and a rotary key of each position, "gqa" the keys and values of num_kv_heads
    attention: str
    num_heads: int
    nope_head_dim: int  # columns of a query's head that are not rotary
    rope_head_dim: int  # those that are: behind the others in MLA, before them in GQA
    v_head_dim: int
    rope: Rope
    rope_interleaved: bool = False  # a pair is two columns side by side; else one of each half
    attention_bias: bool = False
    # MLA
    q_lora_rank: int = 0  # 0: queries come straight from the hidden state
    kv_lora_rank: int = 0
    latent_norm_eps: float = 0.0
    # GQA
    num_kv_heads: int = 0
    output_bias: bool = False
    qk_norm: str = ""  # queries and keys are normed: each "head", or the whole "projection"
    sliding_windows: tuple[
        int, ...
    ] = ()  # for each layer how many positions a row sees, itself included; 0: all of them
    has_sinks: bool = False  # one more score in each head's softmax, which nothing is added for
    # DSA indexer: "full" layers own one, "shared" layers reuse the nearest earlier selection; empty: no such family
    indexer_types: tuple[str, ...] = ()
    index_topk: int = 0
    index_num_heads: int = 0
    index_head_dim: int = 0
    index_norm_eps: float = 0.0
    index_rope_interleaved: bool = True
    # MLP
    mlp_types: tuple[str, ...]  # "dense" or "sparse" for each layer
    intermediate_size: int = 0  # of dense layers
    num_experts: int
    num_active_experts: int
    moe_intermediate_size: int
    num_shared_experts: int = 0
    router: str = "sigmoid"  # scores of experts: sigmoid with a bias in the choice, or "softmax"
    router_has_bias: bool = False  # on the logits
    num_groups: int = 1
    num_active_groups: int = 1
    normalize_weights: bool = True
    routed_scaling: float = 1.0
    # Experts with biases whose halves meet as (up + 1) * gate * sigmoid(alpha * gate), both clamped to this; 0: silu.
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 0.0
    # Not of config.json: a lossy reduction the user may ask for. Of a token's experts keep the fewest whose scores
    # reach this share of their sum; 0 keeps all.
    expert_mass: float = 0.0
    # Not of config.json either: how the KV cache is stored, float32 or, if the user asks for it, rounded to bfloat16.
    kv_dtype: str = "f32"

    @property
    def qk_head_dim(self):
        return self.nope_head_dim + self.rope_head_dim

    @property
    def kv_widths(self):
        """Numbers that attention keeps of a position, in two parts: latent and rotary key, or keys and values."""
        if self.attention == "mla":
            return self.kv_lora_rank, self.rope_head_dim
        return self.num_kv_heads * self.qk_head_dim, self.num_kv_heads * self.v_head_dim

    @property
    def sparse_layers(self):
        return tuple(i for i, kind in enumerate(self.mlp_types) if kind == "sparse")

    def has_own_indexer(self, layer):
        """Whether a layer runs its own indexer; of a family with indexers the MTP layer, one past the last, does."""
        return bool(self.indexer_types) and (layer >= self.num_layers or self.indexer_types[layer] == "full")

    def sliding_window(self, layer):
        """How many positions a row of a layer sees, itself included; 0: all. The MTP layer sees all."""
        return self.sliding_windows[layer] if layer < len(self.sliding_windows) else 0


class ConfigFields:
    """config.json with typed, range-checked reads; every complaint names the file and the key."""

    MISSING = object()

    def __init__(self, raw, path, prefix=""):
        self.raw, self.path, self.prefix = raw, path, prefix

    def inside(self, key, raw):
        """Fields of an object that stands under `key`."""
        return ConfigFields(raw, self.path, f"{self.prefix}{key}.")

    def refuse(self, key, problem):
        raise Refused(f"{self.path}: {self.prefix}{key} {problem}")

    def get(self, key, default=MISSING):
        """The value under `key` or the first present of a tuple of aliases; null counts as absent."""
        keys = key if isinstance(key, tuple) else (key,)
        for name in keys:
            if self.raw.get(name) is not None:
                return self.raw[name]
        if default is ConfigFields.MISSING:
            self.refuse(keys[0], "is missing")
        return default

    def count(self, key, default=MISSING, low=1, high=1 << 24):
        value = self.get(key, default)
        keys = key if isinstance(key, tuple) else (key,)
        name, *others = [name for name in keys if self.raw.get(name) is not None] or keys
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.refuse(name, f"is {show(value)}, expected a whole number from {low} to {high}")
        for other in others:
            if self.raw.get(other, value) != value:
                self.refuse(name, f"is {value}, but {other} is {show(self.raw[other])}; they mean the same")
        return value

    def number(self, key, default=MISSING, low=0.0, high=1e12):
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            self.refuse(key, f"is {show(value)}, expected a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, key, default):
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, f"is {show(value)}, expected true or false")
        return value

    def only(self, key, *allowed):
        """A key that changes the arithmetic: absent, or one of the values this engine computes."""
        value = self.get(key, None)
        if value is not None and value not in allowed:
            key = key if isinstance(key, str) else key[0]
            self.refuse(key, f"is {show(value)}, this engine computes only {' or '.join(map(repr, allowed))}")

    def words(self, key, allowed, length):
        """A list of `length` words out of `allowed`, or None when absent."""
        value = self.get(key, None)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or any(word not in allowed for word in value):
            self.refuse(key, f"must be a list of {length} entries, each {' or '.join(allowed)}")
        return tuple(value)

    def ids(self, key, vocab_size):
        """A token id or a list of them, as a tuple; empty when absent."""
        value = self.get(key, [])
        value = value if isinstance(value, list) else [value]
        for token in value:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                self.refuse(key, f"holds {show(token)}, which is no id of a vocabulary of {vocab_size}")
        return tuple(value)


def read_json_object(path):
    """A JSON object from a file of the snapshot."""
    return parse_json_object(read_file(path), f"{path}:")


def parse_json_object(data, subject):
    """UTF-8 bytes -> a JSON object in which no key stands twice; `subject` begins every complaint."""

    def unique(pairs):
        # The usual parser keeps the last of two equal keys, so two readers could see two different files.
        out = dict(pairs)
        if len(out) < len(pairs):
            seen = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise Refused(f"{subject} holds {shorten(twice)} twice")
        return out

    try:
        raw = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise Refused(f"{subject} is not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise Refused(f"{subject} must hold a JSON object")
    return raw


def read_config(folder):
    """config.json of a snapshot folder -> (ModelConfig, its Family). Refuses an unknown model_type."""
    path = folder / "config.json"
    fields = ConfigFields(read_json_object(path), path)
    known = sorted(module.name for module in pkgutil.iter_modules(families.__path__))
    model_type = fields.get("model_type")
    if model_type not in known:
        fields.refuse("model_type", f"is {show(model_type)}, this engine knows {', '.join(known)}")
    check_quantization(fields)
    family = importlib.import_module(f"snapshot.families.{model_type}").FAMILY
    config = family.parse_config(fields)
    generation = folder / "generation_config.json"
    if os.path.lexists(generation):  # a link to nothing is a broken download, not an absent file
        stop_ids = ConfigFields(read_json_object(generation), generation).ids("eos_token_id", config.vocab_size)
        config = add_stop_ids(config, stop_ids)
    return config, family


def check_quantization(fields):
    """quantization_config of FP8 and MXFP4 checkpoints is read past: a container made of one keeps it. Others are
    refused."""
    raw = fields.get("quantization_config", None)
    if raw is None:
        return
    if not isinstance(raw, dict):
        fields.refuse("quantization_config", "must be an object")
    if raw.get("quant_method") == "mxfp4":
        return
    if raw.get("quant_method") != "fp8":
        found = show(raw.get("quant_method"))
        fields.refuse("quantization_config.quant_method", f"is {found}, this engine reads fp8 and mxfp4")
    for key, known in (("fmt", "e4m3"), ("weight_block_size", [128, 128])):
        if raw.get(key, known) != known:
            fields.refuse(f"quantization_config.{key}", f"is {show(raw[key])}, this engine reads {known}")


def add_stop_ids(config, stop_ids):
    """The config with more stop ids; every declaring file has a say."""
    return replace(config, stop_ids=tuple(dict.fromkeys(config.stop_ids + tuple(stop_ids))))
