"""Policies: when a training loop saves, and which checkpoints it keeps. They decide, and touch no storage."""
