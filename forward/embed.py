"""Token ids -> rows of the embedding table."""


def embed(weight, ids):
    """ids [T] -> float32 [T, hidden]; no scaling."""
    return weight.dequantize_rows(ids)
