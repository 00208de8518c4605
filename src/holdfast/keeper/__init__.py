"""The keeper: the process of a node that makes staged snapshots of trainers durable. Never imports torch."""
