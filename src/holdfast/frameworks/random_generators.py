"""The process's global random generators, and the states of generators as plain values.

Each rank has its own states, and a tensor for each would cost the manifest an entry per rank.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any, TypedDict

import numpy as np
import torch


class GeneratorStates(TypedDict):
    """The states of a process's generators. `cuda` has one state per device, and is empty if CUDA was not in use;
    `device` is the device that was current."""

    python: dict[str, Any]
    numpy: dict[str, Any]
    torch: bytes
    cuda: list[bytes]
    device: int


class RandomGenerators:
    """The generators of ``random``, ``numpy.random``, ``torch`` and ``torch.cuda`` that this process uses."""

    def read(self) -> GeneratorStates:
        """Read the generators' present states. Does not initialise CUDA."""
        uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return GeneratorStates(
            python=read_python(random),
            numpy=read_numpy(np.random),
            torch=_bytes(torch.get_rng_state()),
            cuda=[_bytes(generator.get_state()) for generator in torch.cuda.default_generators] if uses_cuda else [],
            device=torch.cuda.current_device() if uses_cuda else 0,
        )

    def write(self, states: GeneratorStates) -> None:
        """Set the generators to `states`.

        The current device gets the state of the device that was current, and every other one that of its number.
        """
        write_python(random, states["python"])
        write_numpy(np.random, states["numpy"])
        torch.set_rng_state(_tensor(states["torch"]))
        if states["cuda"] and torch.cuda.is_available():
            for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(_tensor(state), device)
            torch.cuda.set_rng_state(_tensor(states["cuda"][states["device"]]), torch.cuda.current_device())

    def reseed(self, rank: int) -> None:
        """Seed all generators from their present states and `rank`, so that each rank gets other seeds."""
        states = self.read()
        held = states["python"]["words"], states["numpy"]["words"], states["torch"], rank.to_bytes(8, "little")
        seed = hashlib.sha256(b"".join(held)).digest()
        random.seed(seed)
        np.random.seed(np.frombuffer(seed, "<u4"))  # noqa: NPY002 - the global generator is the legacy one
        torch.manual_seed(int.from_bytes(seed[:8], "little"))  # seeds CUDA's generators too


def read_python(generator: Any) -> dict[str, Any]:
    """The state of a ``random.Random``, or of the module `random`: one value instead of 625."""
    version, words, gauss = generator.getstate()
    return {"version": version, "words": np.asarray(words, "<u4").tobytes(), "gauss": gauss}


def write_python(generator: Any, state: dict[str, Any]) -> None:
    """Set a generator to a state that `read_python` returned."""
    generator.setstate((state["version"], tuple(np.frombuffer(state["words"], "<u4").tolist()), state["gauss"]))


def read_numpy(generator: Any) -> dict[str, Any]:
    """The state of a ``numpy.random.RandomState``, or of the module `numpy.random`."""
    kind, words, position, has_gauss, gauss = generator.get_state()
    return {
        "kind": kind,
        "words": np.asarray(words, "<u4").tobytes(),
        "position": position,
        "has_gauss": has_gauss,
        "gauss": gauss,
    }


def write_numpy(generator: Any, state: dict[str, Any]) -> None:
    """Set a generator to a state that `read_numpy` returned."""
    words = np.frombuffer(state["words"], "<u4")
    generator.set_state((state["kind"], words, state["position"], state["has_gauss"], state["gauss"]))


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
