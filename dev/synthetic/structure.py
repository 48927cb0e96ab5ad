"""The structure of a synthetic snapshot: the few numbers that are not random and give it the routing of a real model.

What a router sees is the sum of the token's embedding (size 1), what attention brings from the positions before it
(the context), and what the MLPs make of both.

- The first hidden / 32 columns of the embedding hold a constant. Attention's positions alone see it: the norm before a
  router or an MLP has zeros there, or every matrix product would add one direction that all tokens share.
- Through it every query and every key has the same rotary vector, so that part of their product depends on the distance
  alone: even up to `reach` positions, then falling as distance^-FALL, up to FAR times `reach`. So attention is a moving
  mean over the last positions, with random weights for content on top.
- A mean over n positions is sqrt(n) times smaller than one of them; o_proj is scaled to give that back.
- Routers are random. Their bias makes the popularity: if a logit exceeds q with probability p, an expert with bias
  -sigmoid(q) passes the common threshold with probability p. p is the same for all experts, or Zipf over them.

The numbers below were found by trial for 256 experts, 8 a token, at hidden sizes 512, 1,024 and 6,144. For others the
report of dev/make_synthetic.py says what comes out. More context, or a steeper popularity, means more new experts
per window: both concentrate a window on fewer experts and leave the rest to chance.
"""

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

Config = dict[str, Any]  # of config.json

CONSTANT = 2.0  # the value of those columns
FALL = 2.0
FAR = 64  # times `reach`: where the fall ends
MOST = 0.75  # of the tokens that one expert may take
LATE = 1024  # positions before a token that is late in a text


@dataclass(frozen=True)
class Routing:
    """Parameters of a token's routing. Sizes are RMS; the token's own embedding has 1."""

    reach: float  # positions that attention weighs alike
    context: float  # size of what the first layer's attention adds
    attention: float  # of what each later attention adds
    mlp: float  # of what each MLP adds
    zipf: float  # exponent of the popularity, 0 = even


ROUTINGS = {
    "uniform": Routing(reach=1, context=1.2, attention=0.3, mlp=0.4, zipf=0.0),
    "trace": Routing(reach=8, context=1.0, attention=0.35, mlp=0.4, zipf=0.57),
}


@dataclass(frozen=True)
class LayerSizes:
    """RMS sizes that the weights of a layer are scaled for."""

    stream: float  # RMS of the residual stream as it comes in
    out: float  # gain of o_proj
    mlp: float  # RMS of what the MLP shall add


def constant_columns(hidden: int) -> int:
    return max(4, hidden // 32)


def layer_sizes(c: Config, routing: Routing) -> list[LayerSizes]:
    """config.json -> LayerSizes of every layer."""
    constant = CONSTANT**2 * constant_columns(c["hidden_size"]) / c["hidden_size"]
    positions = effective_positions(c, routing.reach)
    energy = 1.0  # RMS squared
    slow = 0.0  # the part of it that changes with the context
    sizes: list[LayerSizes] = []
    for layer in range(c["num_hidden_layers"]):
        wanted = routing.attention if layer else routing.context
        # A mean over the positions before keeps most of what moves slowly, and little of the rest.
        kept = (0.8 * slow + (energy - slow) / positions) / energy
        sizes.append(LayerSizes((energy + constant) ** 0.5, wanted / kept**0.5, routing.mlp))
        slow += wanted**2
        energy += wanted**2 + routing.mlp**2
    return sizes


def frequencies(c: Config) -> np.ndarray:
    width = c["qk_rope_head_dim"]
    return c["rope_parameters"]["rope_theta"] ** (-np.arange(0, width, 2) / width)


def rotary_weights(c: Config, reach: float) -> np.ndarray:
    """-> a weight for each rotary pair: the sum of weight * cos(distance * frequency) falls by FALL for each factor e
    of distance beyond `reach`, for the frequencies are spaced evenly in their logarithm. Lower ones than that takes are
    left out: the sum near 0 would be larger, and with it what the tokens' different sizes do to the scores."""
    spacing = np.log(c["rope_parameters"]["rope_theta"]) * 2 / c["qk_rope_head_dim"]
    used = (frequencies(c) <= 1 / reach) & (frequencies(c) > 1 / (FAR * reach))
    return np.where(used, FALL * spacing, 0.0)


def effective_positions(c: Config, reach: float) -> float:
    """Effective number of positions in the moving mean, late in a text: 1 / sum(p^2) of the attention weights."""
    scores = np.cos(np.arange(LATE)[:, None] * frequencies(c)) @ rotary_weights(c, reach)
    shares = np.exp(scores - scores.max())
    shares /= shares.sum()
    nope, rope = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
    content = nope / (nope + rope)  # variance of the random part of a score
    return 1 / ((shares**2).sum() * np.exp(content))


def popularity(experts: int, active: int, exponent: float) -> np.ndarray:
    """-> for each rank the probability that a token takes it, [experts], in all `active`; none above MOST."""
    shares = np.arange(1, experts + 1) ** -float(exponent)
    for _ in range(100):  # redistribute the part above the bound
        shares = np.minimum(shares * active / shares.sum(), max(MOST, active / experts))
    return shares


def router_bias(experts: int, active: int, exponent: float, rng: np.random.Generator) -> np.ndarray:
    """float32 [experts], the popular ones anywhere; for logits of standard deviation 1."""
    if active == experts:
        return np.zeros(experts, dtype=np.float32)
    quantiles = [NormalDist().inv_cdf(1 - chance) for chance in popularity(experts, active, exponent)]
    bias = -1 / (1 + np.exp(-np.array(quantiles)))
    return rng.permutation(bias - bias.mean()).astype(np.float32)
