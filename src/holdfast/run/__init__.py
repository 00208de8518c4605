"""A run on storage: its paths, its epochs and commits, and what one process remembers of it."""
