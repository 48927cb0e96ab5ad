"""Proposers: where the draft tokens of one sequence may come from, its n-grams and the MTP layer."""

from forward.kv_cache import KvCache
from forward.model import Model
from generate.mtp_draft import MtpProposer
from generate.ngram import NgramProposer


class Proposers:
    """They belong to a KV cache, and may continue over several texts in it."""

    def __init__(self, model: Model, kv: KvCache):
        self.ngrams = NgramProposer()
        self.mtp = MtpProposer(model, kv) if model.weights.mtp else None

    def clone(self, kv: KvCache) -> "Proposers":
        """The same on a clone of the KV cache."""
        other = Proposers.__new__(Proposers)
        other.ngrams, other.mtp = self.ngrams.clone(), self.mtp and self.mtp.clone(kv)
        return other

    def resume(self, ids: list[int]) -> None:
        """Continue with another text, of which the KV cache holds the first kv.length ids: n-grams are forgotten, what
        the MTP layer knows of these ids is kept."""
        self.ngrams = NgramProposer()
        if self.mtp:
            self.mtp.resume(ids)
