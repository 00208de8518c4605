"""Stores of bytes: one small protocol (`holdfast.store.base`), its backends, and their deadlines."""
