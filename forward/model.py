"""What a forward pass needs, assembled once: the frozen config, the resident weights, the expert cache."""

from dataclasses import dataclass, field

from experts.cache import ExpertCache
from experts.route_observer import RouteObserver
from forward.profile import Profile
from snapshot.config import ModelConfig
from snapshot.weights import ModelWeights


@dataclass(frozen=True, slots=True)
class Model:
    """Read-only but for the cache's contents and the profile's clock; the mutable timeline is KvCache."""

    config: ModelConfig
    weights: ModelWeights
    experts: ExpertCache
    prefill_chunk: int  # rows of one sweep over the layers; bounds the memory of a prefill
    profile: Profile = field(default_factory=Profile)
    trace: RouteObserver | None = None  # of all forward passes
