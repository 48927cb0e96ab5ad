"""The model as a forward pass needs it: the frozen config, the dense weights, the expert cache."""

from dataclasses import dataclass, field

from experts.cache import ExpertCache
from experts.route_observer import RouteObserver
from forward.profile import Profile
from snapshot.config import ModelConfig
from snapshot.weights import ModelWeights


@dataclass(frozen=True, slots=True)
class Model:
    """Read-only but for the expert cache and the stage timer; the state of a sequence is its KvCache."""

    config: ModelConfig
    weights: ModelWeights
    experts: ExpertCache
    prefill_chunk: int  # most token rows of a chunk; bounds the memory of a prefill
    kv_room_bytes: int | None = None  # of the memory budget, for KV caches; None: as much as they take
    profile: Profile = field(default_factory=Profile)
    trace: RouteObserver | None = None  # of all forward passes
