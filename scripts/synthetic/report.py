"""What the routing of a snapshot really does, measured: the engine runs over ids and the choices are counted.

Every number is a mean over the sparse layers, whose own numbers stand in the table's columns.
"""

from collections import OrderedDict

import numpy as np

WINDOW = 128  # tokens
NEAR, FAR = 16, 256  # tokens apart: surely the same context, surely another
CAPS = (8, 16, 32, 64, 128)


def record_routes(model, ids):
    """Run the ids as one prefill -> chosen experts [sparse layers, tokens, active], int."""
    import forward.moe
    from forward.kv_state import KvState
    from forward.step import step

    plain, chunks = forward.moe.route, []

    def recording(config, weights, x):
        experts, shares = plain(config, weights, x)
        chunks.append(experts.numpy())
        return experts, shares

    forward.moe.route = recording
    try:
        step(model, [(ids, KvState(model.config, len(ids)))])
    finally:
        forward.moe.route = plain
    layers = len(model.config.sparse_layers)
    return np.stack([np.concatenate(chunks[layer::layers]) for layer in range(layers)])


def as_mask(experts, num_experts):
    """chosen [tokens, active] -> boolean [tokens, experts]."""
    mask = np.zeros((len(experts), num_experts), dtype=bool)
    mask[np.arange(len(experts))[:, None], experts] = True
    return mask


def new_share(mask, window=WINDOW):
    """Of the experts used in a window of tokens, the share not used in the window before; mean over the windows."""
    used = [mask[at : at + window].any(0) for at in range(0, len(mask) - window + 1, window)]
    shares = [(now & ~before).sum() / now.sum() for before, now in zip(used, used[1:], strict=False)]
    return float(np.mean(shares)) if shares else float("nan")


def overlap(mask, pairs):
    """Share of the experts of one token that the other of the pair uses too; NaN without pairs."""
    if not len(pairs):
        return float("nan")
    first, second = np.array(pairs).T
    return float((mask[first] & mask[second]).sum() / mask[first].sum())


def zipf_exponent(counts):
    """Least squares of log(count) over log(rank), ranks of experts that were used at all, the last tenth left out
    (counts of one or two there say nothing)."""
    ordered = np.sort(counts[counts > 0])[::-1].astype(float)
    ordered = ordered[: max(2, len(ordered) * 9 // 10)]
    ranks = np.arange(1, len(ordered) + 1)
    return float(-np.polyfit(np.log(ranks), np.log(ordered), 1)[0])


def entropy(counts):
    """Of the shares of use, 1 = all alike, 0 = one expert takes all."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum() / np.log(len(counts)))


def lru_hit_rate(experts, cap):
    """Hits of a least-recently-used cache of `cap` experts, one token after the other."""
    resident, hits = OrderedDict(), 0
    for token in experts:
        for expert in token.tolist():
            if expert in resident:
                hits += 1
                resident.move_to_end(expert)
            else:
                resident[expert] = True
                if len(resident) > cap:
                    resident.popitem(last=False)
    return hits / experts.size


def id_pairs(ids, limit=4000):
    """-> positions of the same id near each other (at most NEAR), and far apart (at least FAR)."""
    places, near, far = {}, [], []
    for position, token in enumerate(ids):
        for before in places.setdefault(token, []):
            if position - before <= NEAR:
                near.append((before, position))
            elif position - before >= FAR and len(far) < limit:
                far.append((before, position))
        places[token].append(position)
    return near, far


def measure(routes, ids, num_experts):
    """routes [layers, tokens, active] -> list of (what, [a value for each layer])."""
    masks = [as_mask(experts, num_experts) for experts in routes]
    counts = [mask.sum(0) for mask in masks]
    near, far = id_pairs(ids)
    tokens = range(len(ids))
    consecutive = list(zip(tokens, tokens[1:], strict=False))
    other_far = [(i, i + FAR) for i in range(0, len(ids) - FAR) if ids[i] != ids[i + FAR]]
    top = max(1, num_experts // 10)
    rows = [
        ("distinct experts", [int((c > 0).sum()) for c in counts]),
        (f"distinct in {WINDOW} tokens", [mean_distinct(mask) for mask in masks]),
        ("entropy of use, 1 = even", [entropy(c) for c in counts]),
        ("share of the top 10 %", [np.sort(c)[::-1][:top].sum() / c.sum() for c in counts]),
        ("Zipf exponent", [zipf_exponent(c) for c in counts]),
        (f"new experts per {WINDOW} tokens", [new_share(mask) for mask in masks]),
        ("overlap, next token", [overlap(mask, consecutive) for mask in masks]),
        (f"overlap, same id within {NEAR}", [overlap(mask, near) for mask in masks]),
        (f"overlap, same id beyond {FAR}", [overlap(mask, far) for mask in masks]),
        (f"overlap, other id {FAR} apart", [overlap(mask, other_far) for mask in masks]),
    ]
    rows += [(f"LRU hit rate, cap {cap}", [lru_hit_rate(e, cap) for e in routes]) for cap in CAPS if cap < num_experts]
    return rows


def mean_distinct(mask, window=WINDOW):
    used = [mask[at : at + window].any(0).sum() for at in range(0, max(1, len(mask) - window + 1), window)]
    return float(np.mean(used))
