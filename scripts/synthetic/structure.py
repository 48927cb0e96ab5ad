"""What is not random in a synthetic snapshot: the few numbers that make its routing that of a real one.

The residual stream before a router is: the token's embedding (size 1), what attention brings from the recent
positions (slow), and what the MLPs make of both (token in context).

- The first D/32 columns of the embedding hold a constant. Only the positional part of attention sees it.
- That constant gives each query and key the same rotary vector, so their product depends on the distance alone: flat
  up to `reach` positions, then falling as distance^-FALL. Attention is thus a moving mean over recent positions, with
  random content weights on top.
- A mean over n positions shrinks by sqrt(n); o_proj is scaled up to give it back.
- The router's rows are random; its bias makes the popularity: an expert whose logit is above q with probability p gets
  the bias -sigmoid(q), so that all share one threshold. p is even, or Zipf over the experts.
"""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

CONSTANT = 2.0  # the constant in the embedding
FALL = 2.0


@dataclass(frozen=True)
class Routing:
    """How the route of a token comes about. Sizes are RMS relative to the token's embedding."""

    reach: float  # positions that attention weighs alike
    context: float  # size of what the first attention adds
    attention: float  # of what each later attention adds
    mlp: float  # of what each MLP adds
    zipf: float  # exponent of the popularity, 0 = even
    topic: float  # share of the columns of an embedding that all ids of a topic have in common
    stay: float  # tokens that a topic of the text lasts


ROUTINGS = {
    "uniform": Routing(reach=1, context=0.7, attention=0.3, mlp=0.4, zipf=0.0, topic=0.0, stay=0),
    "trace": Routing(reach=32, context=1.0, attention=0.35, mlp=0.4, zipf=0.6, topic=0.3, stay=500),
}


def constant_columns(hidden):
    return max(4, hidden // 32)


def rotary_pattern(theta, width, reach):
    """-> weight of each rotary pair [width / 2]: sum of weight * cos(distance * frequency) falls by FALL for each
    e-fold of distance beyond `reach`. Frequencies too low to matter within 200,000 positions are left out."""
    frequencies = theta ** (-np.arange(0, width, 2) / width)
    step = np.log(theta) * 2 / width
    return np.where((frequencies <= 1 / reach) & (frequencies > 1e-5), FALL * step, 0.0)


def effective_positions(theta, width, reach, content_variance, count=1024):
    """1 / sum(p^2) of the attention weights late in a text: how many positions the moving mean is over."""
    frequencies = theta ** (-np.arange(0, width, 2) / width)
    scores = np.cos(np.arange(count)[:, None] * frequencies) @ rotary_pattern(theta, width, reach)
    shares = np.exp(scores - scores.max())
    shares /= shares.sum()
    return 1 / ((shares**2).sum() * np.exp(content_variance))


def popularity(experts, active, exponent, most=0.75):
    """-> probability of each rank to be chosen by a token, [experts], summing to `active`."""
    shares = np.arange(1, experts + 1) ** -float(exponent)
    for _ in range(100):  # a cap for the first ranks, what is cut off goes to the others
        shares = np.minimum(shares * active / shares.sum(), most)
    return np.minimum(shares, 1.0)


def router_bias(experts, active, exponent, spread, rng):
    """float32 [experts], in random order of popularity; `spread` is the standard deviation of a logit."""
    if active == experts:
        return np.zeros(experts, dtype=np.float32)
    chance = popularity(experts, active, exponent, most=max(0.75, (1 + active / experts) / 2))
    quantiles = np.array([NormalDist().inv_cdf(1 - p) for p in chance]) * spread
    bias = -1 / (1 + np.exp(-quantiles))
    return rng.permutation(bias - bias.mean()).astype(np.float32)
