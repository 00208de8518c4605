"""Ranks that read for each other: what several of them need is read once, and passed on through memory or TCP."""
