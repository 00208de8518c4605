"""The keeper: the process of a node that makes durable what trainers have staged. Never imports torch."""
