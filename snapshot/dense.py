"""The tensors that stay in memory: everything but the routed experts. Names are bound once, shapes checked once.

Vectors and the router are kept as float32; matrices as stored, or packed to fewer bits at load when asked for and not
packed already.
"""

import torch

from errors import Refused
from kernels.formats import DTYPES, FLOATS, SCALE_DTYPES, integer_format
from kernels.quantize import quantize_rows, row_blocks
from kernels.weight import Weight, packed_bytes, packed_view, view_weight
from machine.arena import Arena, align_to_line
from snapshot.formats import StoredWeight, find_stored_weight
from snapshot.weights import ModelWeights, MtpWeights, bind_layer


class DenseTensors:
    """What stays resident, as stored: checked and counted here, read by `load`. with_mtp: the MTP layer too, if it is
    whole; mtp_problem says why it is not there."""

    def __init__(self, config, family, index, with_mtp=False):
        self.config, self.family, self.index = config, family, index
        self.mtp_problem = self.find_mtp_problem() if with_mtp else "not asked for"
        self.stored = {}  # name -> StoredWeight of a matrix, TensorEntry of what becomes float32
        top = family.model_tensors(config)
        self.embed_name, self.head_name = top["embed"][0], top.get("lm_head", top["embed"])[0]
        for layer in range(config.num_layers):
            if not index.has_layer(family.layer_prefix(layer)):
                name = family.attention_tensors(config, layer)["input_norm"][0]
                asked = f"config.json asks for {config.num_layers} layers"
                raise index.incomplete(f"layer {layer} has no tensors, {name} for one; {asked}")
        self.check_no_more_layers()
        self.has_indexer = self.check_indexer()
        routed = (*config.sparse_layers, *self.mtp_layers)
        self.router_names = {self.layer_tables(layer)["router"]["router"][0] for layer in routed}
        biases = (self.layer_tables(layer).get("expert_biases", {}) for layer in routed)
        bias_names = {name for table in biases for name, _ in table.values()}
        for table in self.tables():
            for name, shape in table.values():
                # A rounded router would choose other experts.
                is_float32 = len(shape) == 1 or name in self.router_names or name in bias_names
                self.stored[name] = (
                    index.find_checked(name, shape) if is_float32 else find_stored_weight(index, name, shape)
                )

    @property
    def mtp_layers(self):
        """The MTP layer, or nothing."""
        return () if self.mtp_problem else (self.config.num_layers,)

    @property
    def mtp_names(self):
        """The names of its tensors that stay resident."""
        tables = [table for layer in self.mtp_layers for table in self.layer_tables(layer).values()]
        return {name for table in tables for name, _ in table.values()}

    def find_mtp_problem(self):
        """Why there is no MTP layer to draft with, in words; None when there is one."""
        layer, family = self.config.num_layers, self.family
        if not self.index.has_layer(family.layer_prefix(layer)):
            return "the snapshot has no multi-token-prediction layer"
        tables = [table for part, table in self.layer_tables(layer).items() if part != "mtp_own"]
        if not all(name in self.index for name, _ in family.fused_expert_tensors(self.config, layer).values()):
            tables += [family.expert_tensors(self.config, layer, i) for i in range(self.config.num_experts)]
        missing = [name for table in tables for name, _ in table.values() if name not in self.index]
        return f"tensor {missing[0]} of the multi-token-prediction layer is missing" if missing else None

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
        """Whether there is an indexer. A container without any of a model that has them runs dense attention; a part
        of one is refused."""
        full = [i for i in range(self.config.num_layers) if self.config.has_own_indexer(i)]
        names = [name for i in full for name, _ in self.family.indexer_tensors(self.config, i).values()]
        missing = [name for name in names if name not in self.index]
        if missing and len(missing) < len(names):
            raise self.index.incomplete(f"the indexer is incomplete, tensor {missing[0]} is missing")
        return bool(names) and not missing

    def tables(self):
        """Every table of names this model keeps resident."""
        yield self.family.model_tensors(self.config)
        for layer in (*range(self.config.num_layers), *self.mtp_layers):
            yield from self.layer_tables(layer).values()

    def layer_tables(self, layer):
        """The tables of one layer; that behind the last is the multi-token-prediction layer."""
        c, family = self.config, self.family
        is_mtp = layer == c.num_layers
        tables = {"attention": family.attention_tensors(c, layer)}
        indexer = family.indexer_tensors(c, layer)
        if any(name in self.index for name, _ in indexer.values()) if is_mtp else self.has_indexer_at(layer):
            tables["indexer"] = indexer
        if not is_mtp and c.mlp_types[layer] == "dense":
            tables["mlp"] = family.dense_tensors(c, layer)
        else:
            tables["router"] = family.resolve(family.router_tensors(c, layer), self.index)
            if c.swiglu_limit:
                tables["expert_biases"] = family.expert_biases(c, layer)
            if c.num_shared_experts:
                tables["shared"] = family.shared_expert_tensors(c, layer)
        if is_mtp:
            own = family.mtp_own_tensors(c, layer)
            tables["mtp"] = family.mtp_tensors(c, layer)
            tables["mtp_own"] = {word: own[word] for word in own if own[word][0] in self.index}
        return tables

    def has_indexer_at(self, layer):
        return self.has_indexer and self.config.has_own_indexer(layer)

    @property
    def matrices(self):
        """The stored matrices."""
        return [stored for stored in self.stored.values() if isinstance(stored, StoredWeight)]

    def packs(self, stored, bits):
        """Whether a matrix is packed at load; the embedding is only looked up and stays as stored."""
        return bits < 16 and not stored.format.is_packed and stored.name != self.embed_name

    def matrix_bytes(self, stored, bits):
        """Memory of one matrix."""
        return (
            packed_bytes(integer_format(bits), stored.rows, stored.columns)
            if self.packs(stored, bits)
            else stored.num_bytes
        )

    def num_bytes(self, bits):
        """Bytes of memory once loaded with `bits` for the dense matrices (16 = as stored)."""
        floats = (stored for stored in self.stored.values() if not isinstance(stored, StoredWeight))
        vectors = sum(stored.num_bytes * 4 // stored.item_bytes for stored in floats)
        return vectors + sum(align_to_line(self.matrix_bytes(stored, bits)) for stored in self.matrices)

    def load(self, reader, bits, exact=False):
        """Read everything in file order and bind it -> ModelWeights."""
        loaded = {}
        arena = Arena(sum(align_to_line(self.matrix_bytes(stored, bits)) for stored in self.matrices))
        for name, stored in sorted(self.stored.items(), key=lambda item: place_of(item[1])):
            if not isinstance(stored, StoredWeight):
                tensor = read_float_tensor(reader, stored).float()
                is_router = name in self.router_names
                loaded[name] = Weight(tensor, tensor.shape[1], FLOATS["F32"]) if is_router else tensor
                continue
            buffer = arena.allocate(self.matrix_bytes(stored, bits))
            if self.packs(stored, bits):
                loaded[name] = read_packed(reader, stored, buffer, bits, exact)
            else:
                loaded[name] = read_stored_weight(reader, stored, buffer, exact)

        def bound(table):
            return {word: loaded[name] for word, (name, _) in table.items()}

        def tables_of(layer):
            return {part: bound(table) for part, table in self.layer_tables(layer).items()}

        layers = tuple(bind_layer(tables_of(layer)) for layer in range(self.config.num_layers))
        top = bound(self.family.model_tensors(self.config))
        top.setdefault("lm_head", top["embed"])
        ends, mtp = {word: top[word] for word in ("embed", "lm_head")}, None
        for layer in self.mtp_layers:
            tables = tables_of(layer)
            mtp = MtpWeights(layer=bind_layer(tables), **tables["mtp"], **ends | tables["mtp_own"])
        return ModelWeights(**top, layers=layers, has_indexer=self.has_indexer, mtp=mtp)


def place_of(stored):
    """Where a tensor begins, to sort by."""
    data = stored.data if isinstance(stored, StoredWeight) else stored
    return str(data.path), data.offset


def read_entry_bytes(reader, entry):
    """The bytes of a tensor in memory of its own."""
    raw = torch.empty(entry.num_bytes, dtype=torch.uint8)
    reader.read_into(entry.path, entry.offset, memoryview(raw.numpy()), f"tensor {entry.name}")
    return raw


def read_float_tensor(reader, entry):
    """A float tensor as stored."""
    return read_entry_bytes(reader, entry).view(DTYPES[entry.dtype]).view(entry.shape)


def read_stored_weight(reader, stored, buffer=None, exact=False):
    """A StoredWeight, or a part of one, as it is -> Weight, in `buffer` or in memory of its own."""
    buffer = torch.empty(stored.num_bytes, dtype=torch.uint8) if buffer is None else buffer
    # The scales first: whatever the data's length, they lie where their dtype wants them.
    at, scale_dtype = 0, None
    for entry in reversed(stored.entries):
        part = memoryview(buffer[at : at + entry.num_bytes].numpy())
        reader.read_into(entry.path, entry.offset, part, f"tensor {entry.name}")
        if entry is stored.scales:
            scale_dtype, at = SCALE_DTYPES[entry.dtype], entry.num_bytes
    return view_weight(buffer, stored.format, stored.rows, stored.columns, at, 0, scale_dtype, exact, stored.within)


def read_packed(reader, stored, buffer, bits, exact=False):
    """A matrix packed into `buffer` as it is read, a block of rows at a time: as float32 a head alone is gigabytes."""
    weight = packed_view(buffer, integer_format(bits), stored.rows, stored.columns, exact)
    for start, stop in row_blocks(stored.rows, stored.columns):
        quantize_rows(weight, start, read_stored_weight(reader, stored.slice_rows(start, stop)).dequantize())
    return weight
