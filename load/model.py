"""Settings -> a model ready to run, in every mode: open the snapshot, plan its memory, refuse it or load it."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from experts.cache import ExpertCache
from experts.disk import ExpertDisk
from experts.drive_speed import remember_drives, set_up_drives
from experts.route_trace import RouteTrace
from experts.usage import UsageHistory
from forward.model import Model
from kernels import dispatch
from load.notices import format_notices, lossy_options, run_notices, snapshot_notices
from load.plan import MemoryPlan, make_plan
from machine.memory import MemoryGuard, available_bytes, share_heap
from machine.threads import num_threads
from settings import Settings
from snapshot.config import ModelConfig
from snapshot.dense import DenseTensors
from snapshot.index import TensorIndex
from snapshot.opening import folder_of, locate, read_snapshot
from snapshot.reader import FileReader

DEFAULT_CONTEXT = 4096
# Memory of the tokenizer over the size of tokenizer.json, measured on files of 10 and 26 MB, and over that of a GGUF's
# header, which holds the same in half the bytes.
TOKENIZER_FACTOR, GGUF_TOKENIZER_FACTOR = 20, 40


@dataclass(frozen=True)
class OpenedSnapshot:
    """A snapshot whose headers are read and checked, with its memory plan; no weight is in memory yet."""

    folder: Path  # of a GGUF its first file
    config: ModelConfig
    dense: DenseTensors
    disk: ExpertDisk
    reader: FileReader
    plan: MemoryPlan
    notices: tuple[str, ...]  # one line each, for stderr
    lossy: dict[str, str]  # option that changes answers -> its notice
    resources: ExitStack  # open files and reader threads

    @property
    def context(self) -> int:
        """Positions of a KV cache."""
        return self.plan.context

    def close(self) -> None:
        """End the reader threads and close the files: experts that are not cached can no longer be read."""
        self.resources.close()


@dataclass(frozen=True)
class LoadedModel(OpenedSnapshot):
    """An opened snapshot with its model, ready to run."""

    model: Model
    kernels: str  # which kernels run, a line for stderr
    drive: str  # how experts are read, a line for each drive
    draft: str  # draft tokens per forward pass: auto, or a number
    draft_guard: bool
    usage: UsageHistory | None  # expert uses, learned over runs
    history: str | None  # where the usage history came from, a line for stderr


def snapshot_folder(settings: Settings) -> Path:
    """The folder or the GGUF file that SNAP names. Refused where it is neither."""
    return locate(Path(settings.snap))


def open_snapshot(settings: Settings, kv_slots: int = 1, anywhere: bool = False) -> OpenedSnapshot:
    """Read the headers and plan the memory, with kv_slots KV caches of CTX positions. Refused for a bad snapshot, and
    for one that does not fit in memory. anywhere: for a plan alone, RAM_GB may be more than this machine has."""
    folder = snapshot_folder(settings)
    config, family, index = read_snapshot(folder)
    num_active = config.num_active_experts
    config = replace(
        config,
        num_active_experts=min(settings.topk or num_active, num_active),
        expert_mass=settings.topp if settings.topp < 1 else 0.0,
        kv_dtype=settings.kv_dtype,
    )
    reader = FileReader()
    dense = DenseTensors(config, family, index, with_mtp=settings.drafts)
    disk = ExpertDisk(config, family, index, reader, (*config.sparse_layers, *dense.mtp_layers))
    if settings.snap_mirror:
        disk.add_mirror(folder_of(Path(settings.snap_mirror)))
    index.check_unused_files(family.layer_prefix(config.num_layers))
    context = settings.ctx or min(DEFAULT_CONTEXT, config.max_positions)
    plan = make_plan(settings, dense, disk, context, tokenizer_bytes(folder, index), kv_slots, anywhere)
    lossy = dict(lossy_options(settings, num_active, dense, disk))
    notices = (*snapshot_notices(dense), *(f"[lossy] {line}" for line in lossy.values()))
    notices += *format_notices(settings, dense, disk), *run_notices(settings, dense, plan)
    resources = ExitStack()
    resources.callback(reader.close)
    return OpenedSnapshot(folder, config, dense, disk, reader, plan, notices, lossy, resources)


def tokenizer_bytes(folder: Path, index: TensorIndex) -> int:
    """The most memory that loading the tokenizer takes."""
    if folder.is_file():
        starts = [entry.offset for entry in index.entries.values() if entry.path == folder]
        return GGUF_TOKENIZER_FACTOR * min(starts, default=folder.stat().st_size)
    path = folder / "tokenizer.json"
    return TOKENIZER_FACTOR * path.stat().st_size if path.is_file() else 0


def load_model(settings: Settings, opened: OpenedSnapshot | None = None) -> LoadedModel:
    """Load an opened snapshot (by default the one of `settings`): dense weights, and an empty expert cache."""
    opened = opened or open_snapshot(settings)
    config, plan = opened.config, opened.plan
    share_heap()  # before the first thread starts
    trace = None
    if settings.route_trace:
        slot_bytes = max((slots.slot_bytes for slots in plan.expert_slots), default=0)
        top_k, layers = config.num_active_experts, opened.disk.layers
        trace = RouteTrace(settings.route_trace, config.model_type, layers, config.num_experts, top_k, slot_bytes)
        opened.resources.callback(trace.close)
    kernels = dispatch.start(settings.kernels, settings.cache / "kernels", settings.threads or num_threads())
    # Before anything is loaded: measuring the drives takes memory for eight experts.
    free_bytes = (available_bytes() or 0) - plan.need_bytes
    drive = set_up_drives(opened.disk, settings.read_mode, settings.cache, free_bytes)
    opened.resources.callback(remember_drives, opened.disk, settings.read_mode, settings.cache)
    # Its expert slots are populated while the drive is busy with the dense weights.
    guard, prefetch = MemoryGuard(plan.budget_bytes), settings.lookahead
    experts = ExpertCache(
        config, opened.disk, plan.expert_slots, plan.floor, settings.expert_bits, settings.exact, prefetch, guard
    )
    opened.resources.callback(experts.close)
    weights = opened.dense.load_weights(opened.reader, settings.dense_bits, settings.exact)
    model = Model(config, weights, experts, plan.prefill_chunk, plan.kv_room_bytes, trace=trace)
    usage = history = None
    if settings.usage and config.sparse_layers:
        usage = UsageHistory(opened, settings.cache)
        counts, history = usage.load()
        experts.prime(counts)
    return LoadedModel(
        **vars(opened),
        model=model,
        kernels=kernels,
        drive=drive,
        draft=settings.draft,
        draft_guard=settings.draft_guard,
        usage=usage,
        history=history,
    )
