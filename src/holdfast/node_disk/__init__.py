"""The disk of a node: parts of checkpoints that are durable there before the run itself has them. No torch."""
