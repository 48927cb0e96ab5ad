"""The only loop over layers. A long input goes through it in chunks of token rows, so its memory is bounded."""

from collections.abc import Callable, Iterator

from torch import Tensor

from experts.route_observer import RouteObserver
from forward.chunk import Chunk, TokenBatch, make_chunk, split_batch
from forward.embed import embed
from forward.finite import check_hidden
from forward.layer_forward import layer_forward
from forward.model import Model

Progress = Callable[[int, int, int], None]  # (layers done, layers, token rows of the chunk)
LONG_CHUNK_ROWS = 8  # chunks of at least so many token rows report progress and may be stopped: prefills, big steps


def layers_forward(
    model: Model,
    batch: TokenBatch,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
    observer: RouteObserver | None = None,
) -> Iterator[tuple[Chunk, Tensor]]:
    """Run the new tokens of each sequence through all layers; yield (chunk, hidden [T, D] before the final norm).

    The KV caches hold a chunk's positions when it is yielded. After each layer of a chunk of 8 rows or more
    `progress(layer, num_layers, rows)` is called, then `should_stop()` is asked: true ends the generator, and the KV
    caches hold the chunks yielded so far. ValueError, before anything is computed, when a KV cache has no room, is in
    the batch twice, or comes without tokens. The observer records the routes of this pass.
    """
    for ids, kv in batch:
        if not len(ids):
            raise ValueError("a sequence of the batch has no tokens")
        if len(ids) > kv.room:
            raise ValueError(f"{len(ids)} tokens do not fit a KV cache with room for {kv.room}")
    if len({id(kv) for _, kv in batch}) < len(batch):
        raise ValueError("a KV cache is in the batch twice")
    for part in split_batch(batch, model.prefill_chunk):
        with model.profile.measure("attention"):  # the rotary angles are most of it
            chunk = make_chunk(model.config, part)
            x = embed(model.weights.embed, chunk.ids)  # [T, D]
        is_long = len(chunk) >= LONG_CHUNK_ROWS
        for layer, weights in enumerate(model.weights.layers):
            x = layer_forward(model, layer, weights, x, chunk, observer)
            check_hidden(x, layer, chunk)
            if is_long and progress:
                progress(layer + 1, model.config.num_layers, len(chunk))
            if is_long and should_stop and should_stop():
                return
        for segment in chunk.segments:
            segment.kv.advance(segment.rows.stop - segment.rows.start)
        yield chunk, x
