"""Settings -> a model ready to run: open the snapshot, plan, refuse or load. One function for every mode."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from errors import Refused
from experts.cache import ExpertCache
from experts.disk import ExpertDisk
from experts.drive_speed import set_up_drives
from experts.route_trace import RouteTrace
from experts.usage import UsageHistory
from forward.model import Model
from kernels import dispatch
from kernels.formats import GROUP
from load.plan import MemoryPlan, make_plan
from machine.memory import MemoryGuard, available_bytes
from machine.threads import num_threads
from snapshot.config import ModelConfig, read_config
from snapshot.dense import DenseTensors
from snapshot.index import read_index
from snapshot.reader import FileReader

DEFAULT_CONTEXT = 4096
TOKENIZER_FACTOR = 20


@dataclass(frozen=True)
class OpenedSnapshot:
    """A snapshot whose headers are read and checked, and the plan for it; no weight is in memory yet."""

    folder: Path
    config: ModelConfig
    dense: DenseTensors
    disk: ExpertDisk
    reader: FileReader
    plan: MemoryPlan
    notices: tuple[str, ...]  # one line each, for stderr
    lossy: tuple[str, ...]  # what makes the answers differ from the snapshot's own, in words
    resources: ExitStack  # what `close` ends: files, reader threads

    @property
    def context(self):
        """Positions of a KV cache."""
        return self.plan.context

    def close(self):
        """End the reader threads and close the files: experts that are not in the cache can no longer be read."""
        self.resources.close()


@dataclass(frozen=True)
class LoadedModel(OpenedSnapshot):
    """The same with the model, ready to run."""

    model: Model
    kernels: str  # which run, in one line for stderr
    drive: str  # how experts are read, a line for each drive
    draft: str  # guesses per forward: auto, or a number
    usage: UsageHistory | None  # what is learned over runs
    history: str | None  # what the run begins with of it, in one line for stderr


def check_folder(settings):
    """SNAP -> the folder it names."""
    folder = Path(settings.snap)
    if not folder.is_dir():
        raise Refused(f"SNAP={settings.snap}: no such folder; it must name a Hugging Face snapshot folder")
    return folder


def open_snapshot(settings, kv_slots=1):
    """Settings -> Opened, planned for so many KV caches of CTX positions. Raises Refused for a bad snapshot, and for
    one that does not fit."""
    folder = check_folder(settings)
    config, family = read_config(folder)
    num_active = config.num_active_experts
    config = replace(reduce_experts(settings, config), kv_dtype=settings.kv_dtype)
    index = read_index(folder)
    reader = FileReader()
    dense = DenseTensors(config, family, index, with_mtp=settings.drafts)
    disk = ExpertDisk(config, family, index, reader, (*config.sparse_layers, *dense.mtp_layers))
    if settings.snap_mirror:
        disk.add_mirror(Path(settings.snap_mirror))
    index.check_unused_files(family.layer_prefix(config.num_layers))
    context = settings.ctx or min(DEFAULT_CONTEXT, config.max_positions)
    plan = make_plan(config, dense, disk, settings, context, tokenizer_bytes(folder), kv_slots)
    lossy = list_lossy(settings, num_active, dense, disk)
    notices = (
        *(f"[lossy] {line}" for line in lossy),
        *describe_formats(settings, dense, disk),
        *list_notices(settings, config, dense, plan),
    )
    resources = ExitStack()
    resources.callback(reader.close)
    return OpenedSnapshot(folder, config, dense, disk, reader, plan, notices, lossy, resources)


def tokenizer_bytes(folder):
    """Memory of the tokenizer, about twenty times its file (measured on one of 11 MB)."""
    path = folder / "tokenizer.json"
    return TOKENIZER_FACTOR * path.stat().st_size if path.is_file() else 0


def load_model(settings, opened=None):
    """An opened snapshot (by default settings.snap) -> Loaded: read the dense weights, set up the expert cache."""
    opened = opened or open_snapshot(settings)
    trace = open_trace(settings.route_trace, opened) if settings.route_trace else None
    kernels = dispatch.start(settings.kernels, settings.cache / "kernels", settings.threads or num_threads())
    # Before anything is loaded: measuring takes memory for eight experts.
    free_bytes = (available_bytes() or 0) - opened.plan.need_bytes
    drive = set_up_drives(opened.disk, settings.read_mode, settings.cache, free_bytes)
    # Its slots are made ready while the drive is busy with the dense weights.
    experts = ExpertCache(
        opened.config,
        opened.disk,
        opened.plan.slots,
        opened.plan.floor,
        settings.expert_bits,
        settings.exact,
        settings.expert_tier,
        settings.lookahead,
        MemoryGuard(opened.plan.budget_bytes),
    )
    opened.resources.callback(experts.close)
    weights = opened.dense.load(opened.reader, settings.dense_bits, settings.exact)
    model = Model(opened.config, weights, experts, opened.plan.prefill_chunk, trace=trace)
    usage = history = None
    if settings.usage and settings.expert_tier == "full" and opened.config.sparse_layers:
        usage = UsageHistory(opened, settings.cache)
        counts, history = usage.load()
        experts.prime(counts)
    return LoadedModel(
        **vars(opened), model=model, kernels=kernels, drive=drive, draft=settings.draft, usage=usage, history=history
    )


def open_trace(path, opened):
    """ROUTE_TRACE -> the trace that a run appends to."""
    config, sizes = opened.config, [slots.slot_bytes for slots in opened.plan.slots]
    layers = list(opened.disk.layers)
    trace = RouteTrace(
        path, config.model_type, layers, config.num_experts, config.num_active_experts, max(sizes, default=0)
    )
    opened.resources.callback(trace.close)
    return trace


def reduce_experts(settings, config):
    """TOPK and TOPP: fewer experts a token."""
    num_active = min(settings.topk or config.num_active_experts, config.num_active_experts)
    return replace(config, num_active_experts=num_active, expert_mass=settings.topp if settings.topp < 1 else 0.0)


def list_lossy(settings, num_active, dense, disk):
    """What the user asked for that changes answers, in words; `num_active` experts a token are the model's own."""
    packs_dense = any(dense.packs(stored, settings.dense_bits) for stored in dense.matrices)
    lossy = [
        f"{what} weights are quantized to {bits} bits at load, groups of {GROUP} columns"
        for what, bits, packs in (
            ("expert", settings.expert_bits, disk.packs(settings.expert_bits)),
            ("dense", settings.dense_bits, packs_dense),
        )
        if packs
    ]
    if 0 < settings.topk < num_active:
        lossy.append(f"TOPK={settings.topk}: {settings.topk} of {num_active} experts a token")
    if 0 < settings.topp < 1:
        lossy.append(f"TOPP={settings.topp:g}: a token's weakest experts beyond that share of their scores are dropped")
    if settings.kv_dtype == "bf16":
        lossy.append("KV_DTYPE=bf16: what attention remembers of each token is rounded to bfloat16, in half the memory")
    return tuple(lossy)


def describe_formats(settings, dense, disk):
    """In what formats the weights lie, and which arguments do nothing because of that."""
    ends = {"embedding": dense.embed_name, "head": dense.head_name}
    others = {*ends.values(), *dense.mtp_names}
    dense_formats = dict.fromkeys(stored.format for stored in dense.matrices if stored.name not in others)
    layers = dense.config.sparse_layers
    parts = {"experts": disk.formats(layers), "dense": dense_formats}
    parts |= {what: [dense.stored[name].format] for what, name in ends.items()}
    mtp = [stored.format for stored in dense.matrices if stored.name in dense.mtp_names]
    parts["MTP layer"] = dict.fromkeys([*mtp, *disk.formats(dense.mtp_layers)])
    words = " | ".join(f"{what} {', '.join(map(str, formats))}" for what, formats in parts.items() if formats)
    if any(fmt.is_integer for formats in parts.values() for fmt in formats):
        words += " | activations " + ("float32 (EXACT=1)" if settings.exact else f"8 bits in groups of {GROUP}")
    yield f"[format] {words}"
    for name, bits, formats in (
        ("expert_bits", settings.expert_bits, disk.formats(layers)),
        ("dense_bits", settings.dense_bits, dense_formats),
    ):
        kept = [str(fmt) for fmt in formats if fmt.is_packed]
        if bits < 16 and kept:
            yield f"[format] {name} {bits} changes nothing where the weights are stored as {', '.join(kept)}"


def mtp_notices(dense):
    """Why the MTP layer does not draft, or will not draft well."""
    if dense.mtp_problem:
        return [f"[MTP] speculation with it is off: {dense.mtp_problem}"]
    names = {name for name, _ in dense.layer_tables(dense.config.num_layers)["mtp"].values()}
    formats = {str(stored.format) for stored in dense.matrices if stored.name in names}
    if "int4-row" in formats:
        return ["[MTP] its input is stored in int4 with one scale a row: such a head drafts badly"]
    return []


def list_notices(settings, config, dense, plan):
    """What is never silent: each thing that makes this run differ from the plain one, in a line."""
    notices = []
    if config.indexer_types and not dense.has_indexer:
        notices.append(
            f"[DSA] the snapshot holds no indexer: attention is dense, and answers differ from the reference beyond "
            f"{config.index_topk} positions"
        )
    if config.num_mtp_layers and settings.drafts:
        notices += mtp_notices(dense)
    if plan.num_slots == plan.num_sparse_layers and config.num_experts > 1 and config.sparse_layers:
        notices.append(
            "[cache] one slot per layer: every expert of every token is read from disk, expect it to be slow"
        )
    if plan.context > config.max_positions:
        notices.append(
            f"[ctx] CTX={plan.context} is beyond the {config.max_positions} positions the model was made for"
        )
    if "unknown" in plan.budget_source:
        notices.append(f"[memory] {plan.budget_source}")
    return tuple(notices)
