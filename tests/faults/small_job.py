"""A job with a small state: every value of the head can be checked; and the ways in which its saves may end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast import HoldfastError
from holdfast.store import posix
from tests.support.models import start_new_job


def state(seed: int, *, rank: int = 0, world_size: int = 1) -> dict[str, object]:
    """A small state: one tensor for all, one of the rank's own."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(50, 60, generator=generator),
        f"own-{rank}": torch.full((700,), seed + rank / world_size),
        "progress": {"epoch": seed},
    }


def save(run: str, seed: int, *, timeout_s: float = 60.0) -> str:
    """Save the state of `seed` as step `seed`; returns the place."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return holdfast.save(run, state(seed, rank=rank, world_size=world_size), seed, timeout_s=timeout_s).place


def save_in_new_job(run: str, seed: int) -> str:
    """Become a new job and save; returns the place."""
    start_new_job()
    return save(run, seed)


def head(run: Path | str) -> int:
    """The step of the head, which loads completely and holds, bit for bit, what was saved at that step."""
    view = holdfast.open(run)
    names = [name for name in view.names() if name.startswith("own-")]
    saved = {name: tensor for rank in range(len(names)) for name, tensor in _tensors(view.step, rank, len(names))}
    assert sorted(saved) == view.names()
    for name, tensor in saved.items():
        assert torch.equal(view[name][...], tensor)
    assert view.value("progress") == {"epoch": view.step}
    return view.step


def _tensors(seed: int, rank: int, world_size: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in state(seed, rank=rank, world_size=world_size).items():
        if isinstance(value, torch.Tensor):
            yield name, value


def failure(call: Callable[[], object]) -> HoldfastError:
    """The error that `call` raises, which says what to do next."""
    with pytest.raises(HoldfastError) as raised:
        call()
    assert raised.value.action.endswith(".")
    return raised.value


def resumed(run: Path | str) -> None:
    """Make this process a new job that has loaded the head of `run`."""
    start_new_job()
    view = holdfast.open(run)
    blank = {name: torch.zeros_like(view[name][...]) for name in view.names()}
    holdfast.load(run, into={**blank, "progress": {"epoch": 0}}, continues=True)


def check_aftermath(run: Path, error: HoldfastError | None, *, committed: bool = False) -> None:
    """After a save of step 2 on step 1, which may have been `committed` in spite of its error: the head is sound, and
    the next save of this job works."""
    assert head(run) in ((2,) if error is None else (1, 2) if committed else (1,))
    save(str(run), 3)
    assert head(run) == 3


def temporaries(run: Path) -> list[str]:
    return [str(path.relative_to(run)) for path in run.rglob(posix.TEMPORARY_PREFIX + "*")]
