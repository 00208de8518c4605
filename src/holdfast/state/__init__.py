"""The translation between a nested live state and named tensors in local memory with a flat table of values."""
