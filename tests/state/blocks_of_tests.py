"""A small tensor subclass with planes of all kinds, without a library: codes, scales by block, and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch


class Blocks(torch.Tensor):
    """Codes of the tensor's shape with one scale for each block of elements; torchao's types look like this."""

    codes: torch.Tensor
    scale: torch.Tensor
    qmap: torch.Tensor
    signed: bool
    block_size: int

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, qmap: torch.Tensor, signed: bool) -> Blocks:  # noqa: PYI034
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes, made.scale, made.qmap, made.signed = codes, scale, qmap, signed
        made.block_size = codes.numel() // max(scale.numel(), 1)
        return made

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["codes", "scale", "qmap"], [self.signed]

    @classmethod
    def __tensor_unflatten__(
        cls, planes: Mapping[str, torch.Tensor], context: Any, outer_size: object, outer_stride: object
    ) -> Blocks:
        return cls(planes["codes"], planes["scale"], planes["qmap"], *context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: Sequence[object] = (), kwargs: object = None
    ) -> object:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            of = cast("Blocks", args[0])
            return Blocks(of.codes, of.scale, of.qmap, of.signed)
        raise NotImplementedError(func)

    @staticmethod
    def zeros(
        shape: Sequence[int], *, signed: bool, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> Blocks:
        codes = torch.zeros(tuple(shape), dtype=torch.uint8, device=device)
        return Blocks(codes, torch.zeros(codes.numel() // block_size), torch.zeros(4), signed)


class Rows(torch.Tensor):
    """A weight with one scale for each row, and a value that is compared. Its scales are a tensor of planes too."""

    codes: torch.Tensor
    scales: Scales
    bits: int

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: Scales, bits: int) -> Rows:  # noqa: PYI034
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.bfloat16, device=codes.device)
        made.codes, made.scales, made.bits = codes, scales, bits
        return made

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["codes", "scales"], {"bits": self.bits, "dtype": torch.bfloat16, "block": (1, -1)}

    @classmethod
    def __tensor_unflatten__(
        cls, planes: Mapping[str, Any], context: Mapping[str, Any], outer_size: object, outer_stride: object
    ) -> Rows:
        return cls(planes["codes"], planes["scales"], context["bits"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: Sequence[object] = (), kwargs: object = None
    ) -> object:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            of = cast("Rows", args[0])
            return Rows(of.codes, of.scales, of.bits)
        raise NotImplementedError(func)


class Scales(Rows):
    """A tensor of planes inside another one."""

    codes: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Scales:  # noqa: PYI034
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)
        made.codes = codes
        return made

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["codes"], None

    @classmethod
    def __tensor_unflatten__(
        cls, planes: Mapping[str, Any], context: object, outer_size: object, outer_stride: object
    ) -> Scales:
        return cls(planes["codes"])


class Blockwise(torch.optim.Optimizer):
    """An optimizer with a slot in blocks, as torchao's 8-bit ones have: small parts stay plain."""

    def __init__(self, parameters: Any, block_size: int = 8) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.block_size = block_size

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        from torch.distributed.tensor import DTensor

        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in self.state:
                    self.state[parameter] = {"step": torch.zeros(()), "slot": self.fresh(parameter, DTensor)}
                self.state[parameter]["step"] += 1

    def fresh(self, parameter: Any, dtensor: Any) -> torch.Tensor:
        divided = isinstance(parameter, dtensor)
        local = parameter.to_local() if divided else parameter.detach()
        made = torch.zeros_like(local)
        if local.numel() >= 32 and local.numel() % self.block_size == 0:
            shape = {"signed": True, "block_size": self.block_size, "device": local.device, "dtype": local.dtype}
            made = Blocks.zeros(local.shape, **shape)
        if divided:
            places = parameter.device_mesh, parameter.placements
            made = dtensor.from_local(made, *places, run_check=False, shape=parameter.shape, stride=parameter.stride())
        return made
