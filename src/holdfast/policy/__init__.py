"""Policies of training loops, as pure decisions: facts in, choices out."""
