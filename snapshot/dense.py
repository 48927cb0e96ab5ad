"""Dense weights: all tensors but the routed experts. They stay in memory.

Names and shapes are checked at opening, before anything is read. Vectors and the router become float32; matrices stay
as stored, or are quantized at load if that is asked for and they are not packed already.
"""

from typing import Any

import torch
from torch import Tensor

from errors import Refused
from kernels.formats import DTYPES, FLOATS, SCALE_DTYPES, integer_format
from kernels.quantize import quantize_rows, row_blocks
from kernels.weight import Weight, packed_bytes, packed_view, view_weight
from machine.arena import Arena, align_to_line
from snapshot.config import ModelConfig
from snapshot.family import Family, TensorTable
from snapshot.formats import StoredWeight, find_stored_weight
from snapshot.fused import has_fused_experts
from snapshot.index import TensorEntry, TensorIndex
from snapshot.reader import FileReader
from snapshot.weights import ModelWeights, MtpWeights, bind_layer

PADDING = "padding."  # begins the names of tensors that fill a page of a container
COMPUTED = ".rotary_emb.inv_freq"  # ends the names of tensors that follow from config.json; older files have them


class DenseTensors:
    """The dense tensors as stored, with `load_weights`. with_mtp: those of the MTP layer too, if it is complete."""

    def __init__(self, config: ModelConfig, family: Family, index: TensorIndex, with_mtp: bool = False):
        self.config, self.family, self.index = config, family, index
        self.mtp_problem = self.find_mtp_problem() if with_mtp else "not asked for"  # why the MTP layer is left out
        self.tie_notice: str | None = None  # where config.json and the tensors disagree
        self.top = top = self.tie_embeddings(family.model_tensors(config))
        self.embed_name, self.head_name = top["embed"][0], top["lm_head"][0]
        self.check_layers()
        self.has_indexer = self.find_indexer()
        routed = [self.layer_tables(layer) for layer in (*config.sparse_layers, *self.mtp_layers)]
        self.router_names = {tables["router"]["router"][0] for tables in routed}
        biases = {name for tables in routed for name, _ in tables.get("expert_biases", {}).values()}
        self.matrices: dict[str, StoredWeight] = {}
        self.floats: dict[str, TensorEntry] = {}  # tensors that become float32: vectors, routers and expert biases
        layers = (*range(config.num_layers), *self.mtp_layers)
        for table in (top, *(table for layer in layers for table in self.layer_tables(layer).values())):
            for name, shape in table.values():
                # A quantized router would choose other experts.
                if len(shape) == 1 or name in self.router_names or name in biases:
                    self.floats[name] = index.find_checked(name, shape)
                else:
                    self.matrices[name] = find_stored_weight(index, name, shape)

    def tie_embeddings(self, top: TensorTable) -> TensorTable:
        """The table of embedding and head: one tensor for both where tie_word_embeddings says so, unless both are there
        and differ, as in transformers. Either may be the one that is there."""
        (embed, shape), (head, _) = top["embed"], top["lm_head"]
        if not self.config.tie_word_embeddings:
            return top
        if embed not in self.index and head in self.index:
            return top | {"embed": (head, shape)}
        if head in self.index:
            stored = (find_stored_weight(self.index, name, shape) for name in (embed, head))
            if not have_equal_values(*stored):
                self.tie_notice = f"[config] tie_word_embeddings is true, but {head} differs from {embed}: not tied"
                return top
        return top | {"lm_head": (embed, shape)}

    @property
    def mtp_layers(self) -> tuple[int, ...]:
        """The MTP layer, or nothing."""
        return () if self.mtp_problem else (self.config.num_layers,)

    @property
    def mtp_names(self) -> set[str]:
        """Names of the dense tensors of the MTP layer."""
        tables = [table for layer in self.mtp_layers for table in self.layer_tables(layer).values()]
        return {name for table in tables for name, _ in table.values()}

    def find_mtp_problem(self) -> str | None:
        """Why the MTP layer cannot draft; None if it can."""
        c, family, layer = self.config, self.family, self.config.num_layers
        if not self.index.has_layer(family.layer_prefix(layer)):
            return "the snapshot has no multi-token-prediction layer"
        tables = [table for part, table in self.layer_tables(layer).items() if part != "mtp_own"]
        if not has_fused_experts(self.index, c, family, layer):
            tables += [family.expert_tensors(c, layer, i) for i in range(c.num_experts)]
        missing = [name for table in tables for name, _ in table.values() if name not in self.index]
        return (
            f"tensor {self.index.label(missing[0])} of the multi-token-prediction layer is missing" if missing else None
        )

    def check_layers(self) -> None:
        """Refuse a missing layer, and layers beyond those of config.json; one, the MTP layer, may follow."""
        index, family, num_layers = self.index, self.family, self.config.num_layers
        asked = f"{index.config_name} asks for {num_layers} layers"
        for layer in range(num_layers):
            if not index.has_layer(family.layer_prefix(layer)):
                name = family.attention_tensors(self.config, layer)["input_norm"][0]
                raise index.incomplete(f"layer {layer} has no tensors, {index.label(name)} for one; {asked}")
        has_mtp = self.config.num_mtp_layers or family.mtp_projection(num_layers) in index
        for layer in (num_layers + 1,) if has_mtp else (num_layers, num_layers + 1):
            if index.has_layer(family.layer_prefix(layer)):
                raise Refused(f"{index.subject}: holds tensors of layer {layer}, {asked}")

    def find_indexer(self) -> bool:
        """True if the DSA indexer is there. A container without any runs dense attention; part of one is refused."""
        full = [i for i in range(self.config.num_layers) if self.config.has_own_indexer(i)]
        names = [name for i in full for name, _ in self.family.indexer_tensors(self.config, i).values()]
        missing = [name for name in names if name not in self.index]
        if missing and len(missing) < len(names):
            raise self.index.incomplete(f"the indexer is incomplete, tensor {self.index.label(missing[0])} is missing")
        return bool(names) and not missing

    def layer_tables(self, layer: int) -> dict[str, TensorTable]:
        """The tables of one layer by part; layer num_layers is the MTP layer."""
        c, family = self.config, self.family
        is_mtp = layer == c.num_layers
        tables = {"attention": family.attention_tensors(c, layer)}
        indexer = family.indexer_tensors(c, layer)
        in_index = any(name in self.index for name, _ in indexer.values())
        if in_index if is_mtp else self.has_indexer and c.has_own_indexer(layer):
            tables["indexer"] = indexer
        if not is_mtp and c.mlp_types[layer] == "dense":
            tables["mlp"] = family.dense_mlp_tensors(c, layer)
        else:
            tables["router"] = family.resolve_aliases(family.router_tensors(c, layer), self.index)
            if c.swiglu_limit:
                tables["expert_biases"] = family.expert_bias_tensors(c, layer)
            if c.num_shared_experts:
                tables["shared"] = family.shared_expert_tensors(c, layer)
        if is_mtp:
            own = family.mtp_own_tensors(c, layer)
            tables["mtp"] = family.mtp_tensors(c, layer)
            tables["mtp_own"] = {word: own[word] for word in own if own[word][0] in self.index}
        return tables

    def unused_names(self) -> list[str]:
        """Tensors of the files that nothing has looked up, but for those that a model may do without."""
        c, index = self.config, self.index
        spare = [self.family.layer_prefix(c.num_layers), PADDING]  # the MTP layer
        if self.head_name == self.embed_name:
            spare += [name for name, _ in self.family.model_tensors(c).values()]
        names = index.entries.keys() - index.used_names
        return sorted(name for name in names if not name.startswith(tuple(spare)) and not name.endswith(COMPUTED))

    def quantizes(self, stored: StoredWeight, bits: int) -> bool:
        """True if a matrix is quantized at load; the embedding is only looked up and stays as stored."""
        return bits < 16 and not stored.format.is_packed and stored.name != self.embed_name

    def matrix_bytes(self, stored: StoredWeight, bits: int) -> int:
        """Bytes of one matrix in memory."""
        if self.quantizes(stored, bits):
            return packed_bytes(integer_format(bits), stored.rows, stored.columns)
        return stored.num_bytes

    def arena_bytes(self, bits: int) -> int:
        return sum(align_to_line(self.matrix_bytes(stored, bits)) for stored in self.matrices.values())

    def num_bytes(self, bits: int) -> int:
        """Bytes in memory once loaded with `bits` for the matrices (16 = as stored)."""
        floats = sum(4 * entry.num_bytes // entry.item_bytes for entry in self.floats.values())
        return self.arena_bytes(bits) + floats

    def load_weights(self, reader: FileReader, bits: int, exact: bool = False) -> ModelWeights:
        """Read everything in file order and bind it."""
        # 1) read
        loaded: dict[str, Weight | Tensor] = {}
        arena = Arena(self.arena_bytes(bits))
        starts = self.floats | {name: stored.data for name, stored in self.matrices.items()}
        for name in sorted(starts, key=lambda name: (str(starts[name].path), starts[name].offset)):
            if name in self.floats:
                tensor = read_float_tensor(reader, self.floats[name]).float()
                is_router = name in self.router_names
                loaded[name] = Weight(tensor, tensor.shape[1], FLOATS["F32"]) if is_router else tensor
                continue
            stored = self.matrices[name]
            buffer = arena.allocate(self.matrix_bytes(stored, bits))
            if self.quantizes(stored, bits):
                loaded[name] = read_quantized(reader, stored, buffer, bits, exact)
            else:
                loaded[name] = read_stored_weight(reader, stored, buffer, exact)

        # 2) bind
        def bind(table: TensorTable) -> dict[str, Any]:
            return {word: loaded[name] for word, (name, _) in table.items()}

        def bind_tables(layer: int) -> dict[str, dict[str, Any]]:
            return {part: bind(table) for part, table in self.layer_tables(layer).items()}

        layers = tuple(bind_layer(bind_tables(layer)) for layer in range(self.config.num_layers))
        top = bind(self.top)
        mtp = None
        for layer in self.mtp_layers:
            tables = bind_tables(layer)
            ends = {word: top[word] for word in ("embed", "lm_head")} | tables["mtp_own"]
            mtp = MtpWeights(layer=bind_layer(tables), **tables["mtp"], **ends)
        return ModelWeights(**top, layers=layers, has_indexer=self.has_indexer, mtp=mtp)


def have_equal_values(a: StoredWeight, b: StoredWeight) -> bool:
    """True if two matrices of one shape hold equal numbers. They are read in row blocks up to the first difference."""
    reader = FileReader()
    try:
        for start, stop in row_blocks(a.rows, a.columns):
            parts = (read_stored_weight(reader, stored.slice_rows(start, stop)).dequantize() for stored in (a, b))
            if not torch.equal(*parts):
                return False
        return True
    finally:
        reader.close()


def read_entry_bytes(reader: FileReader, entry: TensorEntry) -> Tensor:
    """The bytes of a tensor as uint8, in memory of its own."""
    data = torch.empty(entry.num_bytes, dtype=torch.uint8)
    reader.read_into(entry.path, entry.offset, data.numpy().data, f"tensor {entry.name}")
    return data


def read_float_tensor(reader: FileReader, entry: TensorEntry) -> Tensor:
    """A tensor of a float dtype as stored."""
    return read_entry_bytes(reader, entry).view(DTYPES[entry.dtype]).view(entry.shape)


def read_kv_parts(reader: FileReader, stored: StoredWeight, buffer: Tensor) -> None:
    """kv_b from its two tensors, weight rows as it has them in one: for each head those of keys, then of values."""
    assert stored.kv_parts is not None and stored.format.dtype is not None
    keys, values = (read_float_tensor(reader, entry) for entry in stored.kv_parts)  # [H, L, N], [H, V, L]
    rows = torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)  # [H * (N + V), L]
    rows = rows[stored.first_row :][: stored.rows]
    buffer.view(stored.format.dtype).view(rows.shape).copy_(rows)


def read_stored_weight(
    reader: FileReader, stored: StoredWeight, buffer: Tensor | None = None, exact: bool = False
) -> Weight:
    """A matrix as stored -> Weight in `buffer` (uint8), or in memory of its own."""
    buffer = torch.empty(stored.num_bytes, dtype=torch.uint8) if buffer is None else buffer
    if stored.kv_parts:
        read_kv_parts(reader, stored, buffer)
        return view_weight(buffer, stored.format, stored.rows, stored.columns, 0, exact=exact)
    # Scales first: behind data of any length they could be misaligned for their dtype.
    at, scale_dtype = 0, torch.float32
    for entry in reversed(stored.entries):
        view = buffer[at : at + entry.num_bytes].numpy().data
        reader.read_into(entry.path, entry.offset, view, f"tensor {entry.name}")
        if entry is stored.scales:
            scale_dtype, at = SCALE_DTYPES[entry.dtype], entry.num_bytes
    return view_weight(buffer, stored.format, stored.rows, stored.columns, at, 0, scale_dtype, exact, stored.selection)


def read_quantized(reader: FileReader, stored: StoredWeight, buffer: Tensor, bits: int, exact: bool = False) -> Weight:
    """A matrix quantized into `buffer` while it is read, in row blocks: an lm_head in float32 would take gigabytes."""
    weight = packed_view(buffer, integer_format(bits), stored.rows, stored.columns, exact)
    for start, stop in row_blocks(stored.rows, stored.columns):
        quantize_rows(weight, start, read_stored_weight(reader, stored.slice_rows(start, stop)).dequantize())
    return weight
