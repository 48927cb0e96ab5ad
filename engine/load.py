"""Settings -> a model ready to run: open the snapshot, plan, refuse or load. One function for every mode."""

from dataclasses import dataclass
from pathlib import Path

from engine.plan import Plan, make_plan
from forward.model import Model
from snapshot.config import read_config
from snapshot.errors import Refused
from snapshot.expert_cache import ExpertCache
from snapshot.expert_disk import ExpertDisk
from snapshot.index import read_index
from snapshot.reader import Reader
from snapshot.resident import ResidentTensors

DEFAULT_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with what a mode wants to know about it."""

    model: Model
    folder: Path
    plan: Plan
    context: int  # positions of a KV state
    notices: tuple[str, ...]  # one line each, for stderr
    reader: Reader

    def close(self):
        """Close the snapshot's files; experts that are not in the cache can no longer be read."""
        self.reader.close()


def load_model(settings):
    """-> Loaded. Raises Refused for a bad snapshot, and for one that does not fit, before any weight is read."""
    folder = Path(settings.snap)
    if not folder.is_dir():
        raise Refused(f"SNAP={settings.snap}: no such folder; it must name a Hugging Face snapshot folder")
    config, family = read_config(folder)
    index = read_index(folder)
    reader = Reader()
    resident = ResidentTensors(config, family, index)
    disk = ExpertDisk(config, family, index, reader)
    context = settings.ctx or min(DEFAULT_CONTEXT, config.max_positions)
    plan = make_plan(config, resident, disk, settings, context, settings.prefill_chunk)
    weights = resident.load(reader, settings.dense_bits)
    experts = ExpertCache(config, disk, plan.num_slots, settings.expert_bits)
    model = Model(config, weights, experts, settings.prefill_chunk)
    notices = list_notices(settings, config, family, index, resident, plan, context)
    return Loaded(model, folder, plan, context, notices, reader)


def list_notices(settings, config, family, index, resident, plan, context):
    """What is never silent: each thing that makes this run differ from the plain one, in a line."""
    notices = []
    for what, bits in (("expert", settings.expert_bits), ("dense", settings.dense_bits)):
        if bits < 16:
            notices.append(f"[bits] {what} weights are quantised to {bits} bits at load, groups of 64 columns: lossy")
    if not resident.has_indexer:
        notices.append(
            f"[DSA] the snapshot holds no indexer: attention is dense, and answers differ from the reference beyond "
            f"{config.index_topk} positions"
        )
    if config.num_mtp_layers:
        found = index.any_with_prefix(family.layer_prefix(config.num_layers))
        state = "is not used yet" if found else "is missing from the snapshot"
        notices.append(f"[MTP] the multi-token-prediction layer {state}: one token per forward")
    if plan.num_slots == 1 and config.num_experts > 1 and config.sparse_layers:
        notices.append(
            "[cache] one slot per layer: every expert of every token is read from disk, expect it to be slow"
        )
    if context > config.max_positions:
        notices.append(f"[ctx] CTX={context} is beyond the {config.max_positions} positions the model was made for")
    return tuple(notices)
