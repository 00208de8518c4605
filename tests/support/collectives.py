"""Collective calls of torch.distributed, counted by torch's profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def counted() -> Iterator[list[str]]:
    """Note each collective of torch.distributed that the block runs."""
    calls: list[str] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        yield calls
    calls += [event.name for event in profiler.events() if event.name.startswith("c10d::")]
