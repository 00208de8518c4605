"""A state as a training loop has it: a module and its optimizer, steps that change it, and work between them."""

from __future__ import annotations

import time
from typing import cast

import torch
from torch import nn

from bench.state import MOMENTS, State, Tree

#: What a step changes: so little that its time hardly counts, and enough that a torn copy is seen.
STEPPED = ("norm", "layers.0.attention_norm", "layers.0.attention.wq")
#: A product of matrices of this width takes part of a millisecond, and stays in a core's cache.
_WIDTH = 256


class Live:
    """A module and AdamW on the memory of `state`, one of `bench.state.LlamaLike`. ``objects`` is what holdfast saves;
    peers that want tensors save ``state.tree``, which is the same memory."""

    def __init__(self, state: State) -> None:
        model, optimizer = cast("Tree", state.tree["model"]), cast("Tree", state.tree["optimizer"])
        self.module = _module(cast("dict[str, torch.Tensor]", model))
        self.optimizer = torch.optim.AdamW(self.module.parameters())
        for name, parameter in self.module.named_parameters():
            slots = {slot: cast("Tree", optimizer[slot])[name] for slot in ("step", *MOMENTS)}
            self.optimizer.state[parameter] = slots
            if name in STEPPED:
                parameter.grad = torch.ones_like(parameter)
        self.objects = {"model": self.module, "optimizer": self.optimizer, "progress": state.tree["progress"]}

    def step(self) -> float:
        """Step the optimizer; returns the seconds that took, with all that it waited for."""
        start_s = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - start_s


class Work:
    """The load of a forward and a backward pass on a core: it is busy, mostly outside of the interpreter."""

    #: Floating-point operations of one product.
    OPERATIONS = 2 * _WIDTH**3

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._left, self._right = (torch.randn(_WIDTH, _WIDTH, generator=generator) for _ in range(2))
        self._product = torch.empty(_WIDTH, _WIDTH)

    def for_seconds(self, seconds: float) -> int:
        """Work for so long; returns how many products that were."""
        end_s, count = time.perf_counter() + seconds, 0
        while time.perf_counter() < end_s:
            self.products(1)
            count += 1
        return count

    def products(self, count: int) -> None:
        """Work for `count` products of matrices, however long they take."""
        for _ in range(count):
            torch.mm(self._left, self._right, out=self._product)


def _module(parameters: dict[str, torch.Tensor]) -> nn.Module:
    """A module with parameters of these names, on the memory of these tensors."""
    root = nn.Module()
    for name, tensor in parameters.items():
        *above, last = name.split(".")
        module = root
        for part in above:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(tensor))
    return root
