"""Statistics of the routing of a snapshot: the engine runs over its reference ids and the choices are counted.

Definitions, for one layer:
    new experts       of the experts that a window of 128 tokens uses, the share that the window before did not use;
                      mean over the windows
    new by request    of the requests of a window (tokens x experts a token), the share that goes to those
    overlap           of the experts of one token, the share that another token uses too; mean over pairs: neighbors;
                      the same id at most 16 or at least 256 positions apart; different ids 256 positions apart
    Zipf exponent     slope of log(uses) over log(rank), the last tenth of the ranks left out
    predicted early   of the experts chosen, the share that the layer's router predicts from the previous router's input
    fixed, LRU        hit rate of a cache that always holds the most used; of one that evicts the least recently used
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

import forward.router
from forward.kv_cache import make_kv_cache
from forward.model import Model
from forward.step import step
from load.model import load_model
from settings import Settings
from snapshot.config import ModelConfig
from snapshot.weights import MoeWeights

WINDOW = 128  # tokens
NEAR, FAR = 16, 256  # positions apart: the same context, another one
CAPS = (8, 16, 32, 64, 128)

Line = tuple[str, Sequence[float]]  # of the table: what, its value in each sparse layer
Pairs = list[tuple[int, int]]  # of positions


def print_report(folder: Path, count: int) -> None:
    """Run the first `count` ids of ref_glm.json and print what the routing did. Refused when it does not fit memory."""
    config, rows = measure_folder(folder, count)
    print(f"routing over {count} tokens, {config.num_experts} experts, {config.num_active_experts} a token")
    print_table(config.sparse_layers, rows)


def measure_folder(folder: Path, count: int) -> tuple[ModelConfig, list[Line]]:
    ids = json.loads((folder / "ref_glm.json").read_text())["full_ids"][:count]
    environ = {"SNAP": str(folder), "CTX": str(count), "PREFILL_CHUNK": str(count), "LOOKAHEAD": "0"}
    loaded = load_model(Settings.read(["1"], environ))
    try:
        return loaded.config, measure(*record_routes(loaded.model, ids), ids, loaded.config.num_experts)
    finally:
        loaded.close()


def print_table(layers: Sequence[int], rows: list[Line]) -> None:
    """Aligned columns, the mean over the layers at the end."""
    width = max(len(what) for what, _ in rows)
    print(" " * width, *(f"{f'layer {layer}':>9}" for layer in layers), f"{'mean':>9}")
    for what, values in rows:
        known = [value for value in values if not np.isnan(value)]
        cells = [*values, float(np.mean(known)) if known else np.nan]
        print(f"{what:{width}}", *(f"{show(value):>9}" for value in cells))


def show(value: float) -> str:
    if np.isnan(value):
        return "-"
    return f"{value:.3f}" if value < 10 else f"{value:.0f}"


def record_routes(model: Model, ids: list[int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Run the ids as a prefill -> (chosen experts of each sparse layer [tokens, active], and what each router but the
    first would choose from the input of the router before it)."""
    plain, layers = forward.router.route, len(model.config.sparse_layers)
    chosen: list[np.ndarray] = []
    predicted: list[np.ndarray] = []
    before: Tensor | None = None

    def recording(config: ModelConfig, weights: MoeWeights, x: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal before
        experts, shares = plain(config, weights, x)
        if before is not None and len(chosen) % layers:
            predicted.append(plain(config, weights, before)[0].numpy())
        chosen.append(experts.numpy())
        before = x
        return experts, shares

    forward.router.route = recording
    try:
        step(model, [(ids, make_kv_cache(model.config, len(ids)))])
    finally:
        forward.router.route = plain
    # One call for each layer of a chunk.
    return [np.concatenate(chosen[i::layers]) for i in range(layers)], [
        np.concatenate(predicted[i :: layers - 1]) for i in range(layers - 1)
    ]


def measure(routes: list[np.ndarray], predictions: list[np.ndarray], ids: list[int], num_experts: int) -> list[Line]:
    """Values are NaN where the ids are too few."""
    masks = [as_mask(experts, num_experts) for experts in routes]
    counts = [mask.sum(0) for mask in masks]
    near, far = pairs_of_same_id(ids)
    neighbors = [(i, i + 1) for i in range(len(ids) - 1)]
    others = [(i, i + FAR) for i in range(len(ids) - FAR) if ids[i] != ids[i + FAR]]
    top = max(1, num_experts // 10)
    early = [overlap(mask, as_mask(chosen, num_experts)) for mask, chosen in zip(masks[1:], predictions, strict=True)]
    rows: list[Line] = [
        ("distinct experts", [(count > 0).sum() for count in counts]),
        (f"distinct experts in {WINDOW} tokens", [windows(mask)[0] for mask in masks]),
        (f"new experts per {WINDOW} tokens", [windows(mask)[1] for mask in masks]),
        ("  by request", [windows(mask)[2] for mask in masks]),
        ("share of the top 10 % of the experts", [fixed_hit_rate(count, top) for count in counts]),
        ("entropy of use, 1 = even", [entropy(count) for count in counts]),
        ("Zipf exponent", [zipf_exponent(count) for count in counts]),
        ("overlap, neighbors", [pair_overlap(mask, neighbors) for mask in masks]),
        (f"overlap, same id within {NEAR}", [pair_overlap(mask, near) for mask in masks]),
        (f"overlap, same id beyond {FAR}", [pair_overlap(mask, far) for mask in masks]),
        (f"overlap, other id {FAR} apart", [pair_overlap(mask, others) for mask in masks]),
        ("predicted one layer early", [np.nan, *early]),
    ]
    caps = [cap for cap in CAPS if cap < num_experts]
    rows += [(f"hit rate, cap {cap}, fixed", [fixed_hit_rate(count, cap) for count in counts]) for cap in caps]
    rows += [(f"hit rate, cap {cap}, LRU", [lru_hit_rate(experts, cap) for experts in routes]) for cap in caps]
    return rows


def as_mask(experts: np.ndarray, num_experts: int) -> np.ndarray:
    """Chosen [tokens, active] -> boolean [tokens, experts]."""
    mask = np.zeros((len(experts), num_experts), dtype=bool)
    np.put_along_axis(mask, experts, True, axis=1)
    return mask


def overlap(first: np.ndarray, second: np.ndarray) -> float:
    return (first & second).sum() / first.sum()


def pair_overlap(mask: np.ndarray, pairs: Pairs) -> float:
    if not pairs:
        return np.nan
    first, second = np.array(pairs).T
    return overlap(mask[first], mask[second])


def pairs_of_same_id(ids: list[int]) -> tuple[Pairs, Pairs]:
    """-> pairs of positions of one id: those at most NEAR apart, those at least FAR apart."""
    places: dict[int, list[int]] = {}
    near: Pairs = []
    far: Pairs = []
    for position, token in enumerate(ids):
        before = places.setdefault(token, [])
        near += [(other, position) for other in before if position - other <= NEAR]
        far += [(other, position) for other in before if position - other >= FAR]
        before.append(position)
    return near, far


def windows(mask: np.ndarray) -> tuple[float, float, float]:
    """-> (distinct experts of a window, share of them that is new, share of the requests that go to new ones)."""
    uses = [mask[at : at + WINDOW].sum(0) for at in range(0, len(mask) - WINDOW + 1, WINDOW)]
    if len(uses) < 2:
        return np.nan, np.nan, np.nan
    new = [(now > 0) & (before == 0) for before, now in zip(uses, uses[1:], strict=False)]
    return (
        np.mean([(now > 0).sum() for now in uses]),
        np.mean([fresh.sum() / (now > 0).sum() for fresh, now in zip(new, uses[1:], strict=True)]),
        np.mean([now[fresh].sum() / now.sum() for fresh, now in zip(new, uses[1:], strict=True)]),
    )


def entropy(counts: np.ndarray) -> float:
    """Entropy of the shares of use, relative to that of even ones."""
    shares = counts[counts > 0] / counts.sum()
    return -(shares * np.log(shares)).sum() / np.log(len(counts))


def zipf_exponent(counts: np.ndarray) -> float:
    used = np.sort(counts[counts > 0])[::-1]
    used = used[: len(used) * 9 // 10]  # single uses at the end are noise
    if len(used) < 2:
        return np.nan
    return -np.polyfit(np.log(np.arange(1, len(used) + 1)), np.log(used), 1)[0]


def fixed_hit_rate(counts: np.ndarray, cap: int) -> float:
    return np.sort(counts)[::-1][:cap].sum() / counts.sum()


def lru_hit_rate(experts: np.ndarray, cap: int) -> float:
    """Hit rate of a cache of `cap` experts, token by token, the experts of each in ascending order."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for expert in experts.ravel().tolist():
        if expert in cached:
            hits += 1
            cached.move_to_end(expert)
        else:
            cached[expert] = None
            if len(cached) > cap:
                cached.popitem(last=False)
    return hits / experts.size
