"""A nested live state <-> named tensors in local memory, plus a flat table of values."""
