"""Draft tokens by n-gram look-up (prompt lookup decoding): what followed when the last tokens occurred before."""


class NgramProposer:
    """An index of one sequence. The longest match of 2 to 8 tokens counts, of equal ones the latest."""

    SHORTEST, LONGEST, LONG = 2, 8, 4
    MAX_PLACES = 64  # earlier places of a pair that are compared

    def __init__(self) -> None:
        self.places: dict[tuple[int, ...], tuple[int, ...]] = {}  # SHORTEST tokens -> where they end
        self.num_indexed = 1  # tokens

    def clone(self) -> "NgramProposer":
        other = NgramProposer()
        other.places, other.num_indexed = self.places.copy(), self.num_indexed
        return other

    def index(self, ids: list[int]) -> None:
        """Add the ids that are new."""
        for end in range(max(self.num_indexed, self.SHORTEST), len(ids)):
            pair = tuple(ids[end - self.SHORTEST : end])
            self.places[pair] = (*self.places.get(pair, ()), end)[-self.MAX_PLACES :]
        self.num_indexed = max(self.num_indexed, len(ids))

    def propose(self, ids: list[int], max_tokens: int) -> tuple[str, list[int]]:
        """-> (name of the proposer, draft tokens). A long match has a name of its own, for its drafts are accepted more
        often."""
        self.index(ids)
        best, best_end = 0, None
        for end in reversed(self.places.get(tuple(ids[-self.SHORTEST :]), ())):
            length = self.SHORTEST
            while length < min(self.LONGEST, end) and ids[end - length - 1] == ids[-length - 1]:
                length += 1
            if length > best:
                best, best_end = length, end
        if best_end is None:
            return "n-gram", []
        return "long n-gram" if best >= self.LONG else "n-gram", ids[best_end : best_end + max_tokens]
