"""A small training that is killed in the middle of a save and goes on: ``python -m demo``."""
