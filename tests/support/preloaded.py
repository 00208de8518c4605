"""The imports of the tests' fork server, so that no process that it forks has to make them.

Afterwards the garbage collector ignores all of it. A warm rank collects garbage after each call, and a pass over the
objects that torch makes takes an eighth of a second; besides, each pass would copy the memory that processes share.
"""

from __future__ import annotations

import gc

import torch

import holdfast
from tests.faults.engine_job import SMALL_NUMEL, Training

assert [getattr(holdfast, name) for name in holdfast.__all__]  # they are imported when they are asked for
torch.set_num_threads(1)
Training(SMALL_NUMEL).step(0)  # so are parts of torch
gc.collect()
gc.freeze()
