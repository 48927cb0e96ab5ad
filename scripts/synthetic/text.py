"""Token ids with the statistics of a text: what ref_glm.json of a synthetic snapshot holds."""

import numpy as np

COMMON = 0.3  # share of tokens that are words of every text
ACTIVE = 2  # topics at a time


def num_topics(vocab):
    """Topics of a vocabulary; id i belongs to topic i modulo this."""
    return max(1, min(64, vocab // 16))


def uniform_ids(vocab, count, rng):
    """Every id as likely as every other, each drawn by itself."""
    return rng.integers(vocab, size=count).tolist()


def topic_ids(vocab, count, rng, stay):
    """A text that is about something for a while.

    A share COMMON of the tokens are words of every text, Zipf over all ids. The others belong to one of the topics at
    hand, Zipf over the ids of that topic. Each topic at hand gives way to another after `stay` tokens on average.
    The Zipf ranks are shifted by 10, so that no id takes more than a few per cent.
    """
    topics = num_topics(vocab)
    everywhere = rng.permutation(vocab)
    words = [rng.permutation(np.arange(topic, vocab, topics)) for topic in range(topics)]
    active = rng.choice(topics, min(ACTIVE, topics), replace=False)
    text = []
    for _ in range(count):
        if rng.random() < len(active) / stay:
            active[rng.integers(len(active))] = rng.integers(topics)
        source = everywhere if rng.random() < COMMON else words[active[rng.integers(len(active))]]
        text.append(int(source[zipf_rank(len(source), rng.random())]))
    return text


def zipf_rank(count, chance, shift=10):
    """A number 0 .. count - 1 with probability about 1 / (rank + shift), from a uniform chance in 0 .. 1."""
    rank = int(shift * ((count + shift) / shift) ** chance - shift)
    return min(rank, count - 1)
