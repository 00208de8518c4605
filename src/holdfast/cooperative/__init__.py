"""Ranks that read for each other: one rank reads the bytes that several need, and passes them on through shared memory
or TCP."""
