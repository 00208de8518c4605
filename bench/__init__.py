"""Holdfast's benchmarks: ``python -m bench``.

Every figure is measured side by side with the raw limit of the same device in the same run, and published
with the samples it came from.
"""
