"""Token ids with the statistics of a text, for ref_glm.json of a synthetic snapshot."""

import numpy as np

COMMON = 0.3  # share of tokens that are words of every text
TOPICS = 64  # of a vocabulary
WORDS = 256  # of a topic, at most
ACTIVE = 2  # topics at a time
STAY = 500  # tokens that a topic lasts
SHIFT = 10  # of the Zipf ranks, so that no id takes more than a few per cent


def uniform_ids(vocab: int, count: int, rng: np.random.Generator) -> list[int]:
    """Every id as likely as every other, each sampled independently."""
    return rng.integers(vocab, size=count).tolist()


def topic_ids(vocab: int, count: int, rng: np.random.Generator) -> list[int]:
    """A text with changing topics.

    A share COMMON of the tokens are words of every text, Zipf over all ids. The others belong to one of the active
    topics, Zipf over the words of that topic. Each active topic is replaced after STAY tokens on average.
    """
    topics = max(1, min(TOPICS, vocab // 16))
    everywhere = rng.permutation(vocab)
    words = rng.permutation(vocab)[: vocab // topics * topics].reshape(topics, -1)[:, :WORDS]
    active = rng.choice(topics, min(ACTIVE, topics), replace=False)
    text = []
    for _ in range(count):
        if rng.random() < len(active) / STAY:
            active[rng.integers(len(active))] = rng.integers(topics)
        source = everywhere if rng.random() < COMMON else words[active[rng.integers(len(active))]]
        text.append(int(source[zipf_rank(len(source), rng.random())]))
    return text


def zipf_rank(count: int, chance: float) -> int:
    """A uniform chance in 0 .. 1 -> a rank 0 .. count - 1, with probability about 1 / (rank + SHIFT)."""
    return min(int(SHIFT * ((count + SHIFT) / SHIFT) ** chance - SHIFT), count - 1)
