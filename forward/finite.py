"""Checks for NaN and infinity in hidden rows and logits, so that they never become a token.

A hidden row or a whole row of logits that is not finite ends the run (NonFinite, exit code 1). A few such logits among
finite ones are set to -inf, never sampled, and warned about. T token rows, D model width, V vocabulary.
"""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from forward.chunk import Chunk
from kernels.dispatch import all_finite


class NonFinite(Exception):
    """The arithmetic broke down. The message is one line that says where."""


class NonFiniteWarning(UserWarning):
    """Some logits of a row are not finite; the others are used."""


def check_hidden(x: Tensor, layer: int, chunk: Chunk) -> None:
    """Check x [T, D] after `layer`. NonFinite names the layer and the first position."""
    if not all_finite(x):
        position = int(chunk.positions[~x.isfinite().all(-1)][0])
        raise NonFinite(f"the hidden state after layer {layer} is not finite at position {position}: damaged weights?")


def check_logits(logits: Tensor, positions: Sequence[int]) -> Tensor:
    """logits [T, V] after the tokens at `positions` -> logits, -inf where one is NaN or infinite."""
    if all_finite(logits):
        return logits
    finite = logits.isfinite()
    for row, position in enumerate(positions):
        if not finite[row].any():
            raise NonFinite(f"no logit after position {position} is finite: damaged output weights?")
        bad = (~finite[row]).nonzero()[:, 0].tolist()
        if bad:
            which = f"{len(bad)} of {logits.shape[1]} logits after position {position} (id {bad[0]} first)"
            warnings.warn(f"{which} are not finite and never sampled", NonFiniteWarning, stacklevel=2)
    return logits.masked_fill(~finite, -torch.inf)
