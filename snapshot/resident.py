"""The tensors that stay in memory: everything but the routed experts. Names are bound once, shapes checked once.

Vectors and the router are kept as float32; matrices as stored, or packed to fewer bits at load when asked for.
"""

from dataclasses import dataclass

import torch

from kernels.packing import DTYPES, Weight, empty_packed, pack_rows, packed_bytes, row_blocks
from snapshot.errors import Refused


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    q_b: Weight  # [heads * width, q latent]
    k: Weight  # [width, hidden]
    k_norm: torch.Tensor
    k_norm_bias: torch.Tensor
    head_weights: Weight  # [heads, hidden]


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_a: Weight
    q_a_norm: torch.Tensor
    q_b: Weight  # per head: nope rows, then rope rows
    kv_a: Weight  # latent rows, then rope rows
    kv_a_norm: torch.Tensor
    kv_b: Weight  # per head: nope key rows, then value rows
    o: Weight
    q_a_bias: torch.Tensor | None = None
    kv_a_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class MlpWeights:
    gate: Weight
    up: Weight
    down: Weight


@dataclass(frozen=True, slots=True)
class MoeWeights:
    router: torch.Tensor  # [experts, hidden] float32
    router_bias: torch.Tensor  # [experts] float32, takes part in the choice alone
    shared: MlpWeights


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention: AttentionWeights
    indexer: IndexerWeights | None  # None on shared layers, and where a container has no indexer at all
    mlp: MlpWeights | MoeWeights


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embed: Weight
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    lm_head: Weight
    has_indexer: bool


class ResidentTensors:
    """What stays resident, as entries of the index: checked and counted here, read by `load`."""

    def __init__(self, config, family, index):
        self.config, self.family, self.index = config, family, index
        self.entries = {}
        self.router_names = {family.router_tensors(config, i)["router"][0] for i in config.sparse_layers}
        self.embed_name = family.model_tensors(config)["embed"][0]
        for layer in range(config.num_layers):
            if not index.has_layer(family.layer_prefix(layer)):
                name = family.attention_tensors(config, layer)["input_norm"][0]
                asked = f"config.json asks for {config.num_layers} layers"
                raise index.incomplete(f"layer {layer} has no tensors, {name} for one; {asked}")
        self.check_no_more_layers()
        self.has_indexer = self.check_indexer()
        for table in self.tables():
            for name, shape in table.values():
                self.entries[name] = index.find(name, shape)

    def check_no_more_layers(self):
        """Layers beyond those of config.json would be left out in silence; one, the MTP layer, may follow."""
        last, family = self.config.num_layers, self.family
        mtp = self.config.num_mtp_layers or family.mtp_tensor(last) in self.index
        for layer in (last + 1,) if mtp else (last, last + 1):
            if self.index.has_layer(family.layer_prefix(layer)):
                raise Refused(
                    f"{self.index.folder}: holds tensors of layer {layer}, config.json asks for {last} layers"
                )

    def check_indexer(self):
        """Whether there is an indexer. A container without any runs dense attention; a part of one is refused."""
        full = [i for i in range(self.config.num_layers) if self.config.layer_is_full(i)]
        names = [name for i in full for name, _ in self.family.indexer_tensors(self.config, i).values()]
        missing = [name for name in names if name not in self.index]
        if missing and len(missing) < len(names):
            raise self.index.incomplete(f"the indexer is incomplete, tensor {missing[0]} is missing")
        return not missing

    def tables(self):
        """Every table of names this model keeps resident."""
        yield self.family.model_tensors(self.config)
        for layer in range(self.config.num_layers):
            yield from self.layer_tables(layer).values()

    def layer_tables(self, layer):
        c, family = self.config, self.family
        tables = {"attention": family.attention_tensors(c, layer)}
        if self.has_indexer and c.layer_is_full(layer):
            tables["indexer"] = family.indexer_tensors(c, layer)
        if c.mlp_types[layer] == "dense":
            tables["mlp"] = family.dense_tensors(c, layer)
        else:
            tables["router"] = family.router_tensors(c, layer)
            tables["shared"] = family.shared_expert_tensors(c, layer)
        return tables

    def is_float32(self, entry):
        """Vectors, and the router: a rounded router would choose other experts."""
        return len(entry.shape) == 1 or entry.name in self.router_names

    def packs(self, entry, bits):
        """Whether a matrix is packed at load; the embedding is only looked up and stays as stored."""
        return bits < 16 and not self.is_float32(entry) and entry.name != self.embed_name

    def num_bytes(self, bits):
        """Bytes of memory once loaded with `bits` for the dense matrices (16 = as stored)."""
        total = 0
        for entry in self.entries.values():
            if self.is_float32(entry):
                total += entry.num_bytes * 4 // entry.item_bytes
            else:
                total += packed_bytes(bits, *entry.shape) if self.packs(entry, bits) else entry.num_bytes
        return total

    def load(self, reader, bits):
        """Read everything in file order and bind it -> ModelWeights."""
        loaded = {}
        for entry in sorted(self.entries.values(), key=lambda entry: (str(entry.path), entry.offset)):
            if self.is_float32(entry):
                loaded[entry.name] = read_tensor(reader, entry).float()
            elif self.packs(entry, bits):
                loaded[entry.name] = read_packed(reader, entry, bits)
            else:
                loaded[entry.name] = Weight(read_tensor(reader, entry), entry.shape[1])

        def bound(table):
            return {word: loaded[name] for word, (name, _) in table.items()}

        layers = []
        for layer in range(self.config.num_layers):
            tables = {part: bound(table) for part, table in self.layer_tables(layer).items()}
            if "mlp" in tables:
                mlp = MlpWeights(**tables["mlp"])
            else:
                mlp = MoeWeights(**tables["router"], shared=MlpWeights(**tables["shared"]))
            indexer = IndexerWeights(**tables["indexer"]) if "indexer" in tables else None
            layers.append(LayerWeights(AttentionWeights(**tables["attention"]), indexer, mlp))
        top = bound(self.family.model_tensors(self.config))
        head = top.get("lm_head", top["embed"])
        return ModelWeights(top["embed"], tuple(layers), top["norm"], head, self.has_indexer)


def read_tensor(reader, entry, start=0, stop=None):
    """One tensor as stored, or rows start .. stop of it, in memory of its own."""
    rows = entry.shape[0] if stop is None else stop - start
    row_bytes = entry.num_bytes // max(1, entry.shape[0])
    raw = torch.empty(rows * row_bytes, dtype=torch.uint8)
    reader.read_into(entry.path, entry.offset + start * row_bytes, memoryview(raw.numpy()), f"tensor {entry.name}")
    return raw.view(DTYPES[entry.dtype]).view(rows, *entry.shape[1:])


def read_packed(reader, entry, bits):
    """One matrix packed as it is read, a block of rows at a time: as float32 an output head alone is gigabytes."""
    weight = empty_packed(bits, *entry.shape)
    for start, stop in row_blocks(*entry.shape):
        pack_rows(weight, start, read_tensor(reader, entry, start, stop).float())
    return weight
