"""Saving many tensors, and opening what was saved to read one of them: one way each per library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
#: Reads the tensor of a name from what was saved in a folder.
Read = Callable[[Path, str], Floats]

SHAPE = (4, 4)
_FILE = "model.safetensors"


def name_of(index: int) -> str:
    """The name of a tensor."""
    return f"layers.{index:06d}.weight"


def expected(index: int) -> Floats:
    """The expected content."""
    return np.full(SHAPE, index, np.float32)


def _save_holdfast(folder: Path, num_tensors: int) -> None:
    import torch

    import holdfast

    state = {name_of(index): torch.from_numpy(expected(index)) for index in range(num_tensors)}
    holdfast.save(str(folder / "run"), state, 1)


def _save_dcp(folder: Path, num_tensors: int) -> None:
    import torch
    from torch.distributed.checkpoint.state_dict_saver import save

    save(
        {name_of(index): torch.from_numpy(expected(index)) for index in range(num_tensors)},
        checkpoint_id=folder,
        no_dist=True,
    )


def _save_safetensors(folder: Path, num_tensors: int) -> None:
    from safetensors.numpy import save_file

    save_file({name_of(index): expected(index) for index in range(num_tensors)}, folder / _FILE)


def _holdfast() -> Read:
    import torch  # noqa: F401 - it is not what is measured

    import holdfast

    return lambda folder, name: holdfast.open(str(folder / "run"))[name].numpy()


def _dcp() -> Read:
    import torch
    from torch.distributed.checkpoint.state_dict_loader import load

    def read(folder: Path, name: str) -> Floats:
        state = {name: torch.empty(SHAPE)}
        load(state, checkpoint_id=folder, no_dist=True)
        return state[name].numpy()

    return read


def _safetensors() -> Read:
    from safetensors import safe_open

    def read(folder: Path, name: str) -> Floats:
        with safe_open(folder / _FILE, framework="numpy") as file:
            found: Floats = file.get_tensor(name)
        return found

    return read


#: How each library saves many tensors.
SAVERS: dict[str, Callable[[Path, int], None]] = {
    "holdfast": _save_holdfast,
    "dcp": _save_dcp,
    "safetensors": _save_safetensors,
}
#: Imports what each library needs, and gives what opens and reads.
OPENERS: dict[str, Callable[[], Read]] = {"holdfast": _holdfast, "dcp": _dcp, "safetensors": _safetensors}
