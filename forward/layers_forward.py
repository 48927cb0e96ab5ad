"""The only loop over layers. Long inputs go through it in chunks of rows, so their memory is bounded."""

from forward.chunk import make_chunk, split_batch
from forward.embed import embed
from forward.finite import check_hidden
from forward.layer_forward import layer_forward

PROGRESS_ROWS = 8  # from this many rows on a chunk is a prefill worth reporting


def layers_forward(model, batch, progress=None):
    """batch [(ids, KvState), ...] -> yields (Chunk, hidden [rows, D] before the final norm) for each chunk.

    Every chunk's positions are in the states when it is yielded. `progress(layer, num_layers, rows)` is called after
    each layer of a chunk of 8 rows or more. ValueError, before anything is computed, when a state has no room, stands
    in the batch twice, or comes without tokens.
    """
    for ids, kv in batch:
        if not len(ids):
            raise ValueError("a sequence of the batch has no tokens")
        if len(ids) > kv.room:
            raise ValueError(f"{len(ids)} tokens do not fit a KV state with room for {kv.room}")
    if len({id(kv) for _, kv in batch}) < len(batch):
        raise ValueError("a KV state stands in the batch twice")
    num_layers = model.config.num_layers
    for pieces in split_batch(batch, model.prefill_chunk):
        with model.profile.measure("attention"):  # the rotary angles are most of it
            chunk = make_chunk(model.config, pieces)
            x = embed(model.weights.embed, chunk.ids)
        selections = [None] * len(chunk.segments)
        for layer, weights in enumerate(model.weights.layers):
            x, selections = layer_forward(model, layer, weights, x, chunk, selections)
            check_hidden(x, layer, chunk)
            if progress and len(chunk) >= PROGRESS_ROWS:
                progress(layer + 1, num_layers, len(chunk))
        for segment in chunk.segments:
            segment.kv.advance(segment.stop - segment.start)
        yield chunk, x
