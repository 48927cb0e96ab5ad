"""Numbers that are none: found where they arise, named, never turned into a token.

A hidden state or a whole row of logits that is not finite ends the run (NonFinite, exit code 1). A few such logits
among good ones are set to -inf, so that nothing chooses them, and warned about.
"""

import warnings

import torch

from kernels.dispatch import all_finite


class NonFinite(Exception):
    """The arithmetic broke down. The message is one line that names where."""


class NonFiniteWarning(UserWarning):
    """Some logits of a row are not finite; the others are used."""


def check_hidden(x, layer, chunk):
    """x [T, D] after `layer` -> x; NonFinite names the layer and the first position."""
    if all_finite(x):
        return x
    row = int((~x.isfinite().all(-1)).nonzero()[0])
    segment = next(segment for segment in chunk.segments if segment.start <= row < segment.stop)
    position = segment.first + row - segment.start
    raise NonFinite(
        f"the hidden state after layer {layer} is not finite at position {position}; are the weights whole?"
    )


def check_logits(logits, positions):
    """logits [T, vocab] after the tokens at `positions` -> logits with -inf where one is NaN or infinite."""
    if all_finite(logits):
        return logits
    finite = logits.isfinite()
    for row, position in enumerate(positions):
        if not finite[row].any():
            raise NonFinite(f"no logit after position {position} is finite; are the output weights whole?")
        bad = (~finite[row]).nonzero()[:, 0].tolist()
        if bad:
            text = (
                f"{len(bad)} of {logits.shape[1]} logits after position {position} are not finite (id {bad[0]} first)"
            )
            warnings.warn(f"{text}; they are never chosen", NonFiniteWarning, stacklevel=2)
    return logits.masked_fill(~finite, -torch.inf)
