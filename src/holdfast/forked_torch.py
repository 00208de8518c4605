"""Torch's pool of threads in a process that was forked from one that had a pool.

Torch drops the pool of its parent in the first thread that asks for it, and other threads that ask at the same moment
fail: "pool INTERNAL ASSERT FAILED at ParallelOpenMP.cpp: Invalid thread pool!". Each new thread asks at its first
operation, if the number of threads was ever set. So one thread has to ask before several do.
"""

from __future__ import annotations

import os

import torch

_has_old_pool = False


def renew_pool() -> None:
    """Let torch make a pool of threads for this process, if it was forked and has none yet. Call it before the first
    threads that use torch are started."""
    global _has_old_pool  # noqa: PLW0603 - a fact about the process
    if _has_old_pool:
        torch.set_num_threads(torch.get_num_threads())
        _has_old_pool = False


def _note_fork() -> None:
    global _has_old_pool  # noqa: PLW0603 - as above
    _has_old_pool = True


os.register_at_fork(after_in_child=_note_fork)
