"""A run on storage: its paths, its epochs and commits, and the memory that one process keeps of it."""
