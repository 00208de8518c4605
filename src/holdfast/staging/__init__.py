"""From device memory to node memory: the arena of a rank, and snapshots of its state in it."""
