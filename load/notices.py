"""The notices of an opened snapshot, one line each for stderr: formats, lossy options, what is missing or slow.

Whatever makes a run's answers or speed differ from the plain run is in one of these lines.
"""

from collections.abc import Iterator

from experts.disk import ExpertDisk
from kernels.formats import GROUP
from load.plan import MemoryPlan
from settings import Settings
from snapshot.dense import DenseTensors
from snapshot.folder import list_names


def lossy_options(
    settings: Settings, num_active: int, dense: DenseTensors, disk: ExpertDisk
) -> Iterator[tuple[str, str]]:
    """(option of the user that changes answers, the notice). num_active: active experts of a token by config.json."""
    at_load = f"bits at load, in groups of {GROUP} columns"
    if disk.quantizes(settings.expert_bits):
        yield f"expert_bits={settings.expert_bits}", f"expert weights are quantized to {settings.expert_bits} {at_load}"
    if any(dense.quantizes(stored, settings.dense_bits) for stored in dense.matrices.values()):
        yield f"dense_bits={settings.dense_bits}", f"dense weights are quantized to {settings.dense_bits} {at_load}"
    if 0 < settings.topk < num_active:
        option = f"TOPK={settings.topk}"
        yield option, f"{option}: {settings.topk} of the model's {num_active} active experts a token"
    if 0 < settings.topp < 1:
        option = f"TOPP={settings.topp:g}"
        yield option, f"{option}: a token's weakest experts beyond that share of its router scores are dropped"
    if settings.kv_dtype != "f32":
        kept = {"bf16": "bfloat16, in half the memory", "int8": "8 bits in groups of 64, in a quarter of the memory"}
        option = f"KV_DTYPE={settings.kv_dtype}"
        yield option, f"{option}: the KV cache is rounded to {kept[settings.kv_dtype]}"


def format_notices(settings: Settings, dense: DenseTensors, disk: ExpertDisk) -> Iterator[str]:
    """The weight formats, and the arguments that have no effect on them."""
    stored = {name: matrix.format for name, matrix in dense.matrices.items()}
    mtp_names = dense.mtp_names
    not_layers = {dense.embed_name, dense.head_name, *mtp_names}
    of_mtp = [fmt for name, fmt in stored.items() if name in mtp_names]
    formats = {
        "experts": disk.formats(dense.config.sparse_layers),
        "dense": dict.fromkeys(fmt for name, fmt in stored.items() if name not in not_layers),
        "embedding": [stored[dense.embed_name]],
        "head": [stored[dense.head_name]],
        "MTP layer": dict.fromkeys([*of_mtp, *disk.formats(dense.mtp_layers)]),
    }
    line = " | ".join(f"{which} {', '.join(map(str, found))}" for which, found in formats.items() if found)
    if any(fmt.is_integer for found in formats.values() for fmt in found):
        line += " | activations " + ("float32 (EXACT=1)" if settings.exact else f"8 bits in groups of {GROUP}")
    yield f"[format] {line}"
    for name, which in (("expert_bits", "experts"), ("dense_bits", "dense")):
        bits: int = getattr(settings, name)
        quantized = [str(fmt) for fmt in formats[which] if fmt.is_packed]
        if bits < 16 and quantized:
            yield f"[format] {name} {bits} has no effect on weights that are stored as {', '.join(quantized)}"


def snapshot_notices(dense: DenseTensors) -> Iterator[str]:
    """What of the snapshot is passed over, and which of two places counts where they disagree. All its tensors must
    have been looked up."""
    index = dense.index
    if index.not_read:
        yield f"[snapshot] {index.not_read}"
    yield from dense.config.notices
    if dense.tie_notice:
        yield dense.tie_notice
    labels = [index.label(name) for name in dense.unused_names()]
    if labels:
        count = f"{len(labels)} tensors have" if len(labels) > 1 else "a tensor has"
        yield f"[snapshot] {count} no place in the model of {index.config_name}, not used: {list_names(labels)}"


def run_notices(settings: Settings, dense: DenseTensors, plan: MemoryPlan) -> Iterator[str]:
    """Notices of everything else that differs from a plain run."""
    config = dense.config
    if config.indexer_types and not dense.has_indexer:
        yield (
            "[DSA] the snapshot has no indexer: attention is dense, and answers differ from the reference beyond "
            f"{config.index_topk} positions"
        )
    if config.num_mtp_layers and settings.drafts:
        if dense.mtp_problem:
            yield f"[MTP] no draft tokens from the MTP layer: {dense.mtp_problem}"
        else:
            names = {name for name, _ in dense.layer_tables(config.num_layers)["mtp"].values()}
            if any(str(dense.matrices[name].format) == "int4-row" for name in names & dense.matrices.keys()):
                yield "[MTP] the layer's input projection is int4 with one scale a row: few draft tokens are accepted"
    if plan.num_expert_slots == plan.num_sparse_layers and config.num_experts > 1 and config.sparse_layers:
        yield "[cache] one expert slot per layer: every expert of every token is read from disk, which is slow"
    if plan.context > config.max_positions:
        yield f"[ctx] CTX={plan.context} is beyond the {config.max_positions} positions the model was trained for"
    if "unknown" in plan.budget_source:
        yield f"[memory] {plan.budget_source}"
