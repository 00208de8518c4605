"""A dtype difference is an error until it is allowed, and then elements are cast as torch casts them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam

import holdfast
from holdfast import Box, FlatRange, IncompatibleError, Piecewise
from holdfast.mapping import Cast
from holdfast.mapping.parts import castable

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 20).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("stored", FLOATS, ids=str)
@pytest.mark.parametrize("live", FLOATS, ids=str)
def test_any_float_becomes_any_other_as_torch_casts_it(tmp_path: Path, stored: torch.dtype, live: torch.dtype) -> None:
    saved, into = values(stored, 5, 3), torch.zeros(5, 3, dtype=live)
    scalar, scalar_into = values(stored), torch.zeros((), dtype=live)
    holdfast.save(tmp_path / "run", {"w": saved, "s": scalar}, 1)
    report = holdfast.load(tmp_path / "run", {"w": into, "s": scalar_into}, cast=True)
    assert torch.equal(bits(into), bits(saved.to(live)))
    assert torch.equal(bits(scalar_into), bits(scalar.to(live)))
    assert report.cast == (() if stored is live else ("s", "w"))


@pytest.mark.parametrize(
    ("stored", "live", "allowed"),
    [
        ("int32", "int64", True),
        ("uint8", "int16", True),
        ("uint16", "uint32", True),
        ("complex64", "complex128", True),
        ("complex128", "complex64", True),
        ("int64", "int32", False),
        ("uint8", "int8", False),
        ("int8", "uint64", False),
        ("int64", "float64", False),
        ("float32", "int64", False),
        ("float32", "complex64", False),
        ("complex64", "float32", False),
        ("bool", "uint8", False),
        ("uint8", "bool", False),
        ("float32", "float4_e2m1fn_x2", False),
    ],
)
def test_a_cast_changes_precision_and_never_the_kind_of_number(stored: str, live: str, allowed: bool) -> None:
    assert castable(stored, live) == allowed


def test_integers_become_wider_and_nothing_else(tmp_path: Path) -> None:
    saved = torch.tensor([-(1 << 31), 7, (1 << 31) - 1], dtype=torch.int32)
    holdfast.save(tmp_path / "run", {"w": saved}, 1)
    into = torch.zeros(3, dtype=torch.int64)
    holdfast.load(tmp_path / "run", {"w": into}, cast=True)
    assert torch.equal(into, saved.long())
    with pytest.raises(IncompatibleError, match=r"incompatible\.dtype.*int16 here, int32 .* no cast converts"):
        holdfast.load(tmp_path / "run", {"w": torch.zeros(3, dtype=torch.int16)}, cast=True)
    with pytest.raises(IncompatibleError, match=r"float32 here, int32 .* no cast converts"):
        holdfast.load(tmp_path / "run", {"w": torch.zeros(3)}, cast="w")


def test_without_leave_a_difference_is_an_error_that_says_how_to_allow_it(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"m": nn.Linear(2, 2)}, 1)
    into = nn.Linear(2, 2).half()
    before = into.weight.detach().clone()
    with pytest.raises(IncompatibleError, match=r"incompatible\.dtype.*float16 here, float32 .*cast="):
        holdfast.load(tmp_path / "run", {"m": into})
    assert torch.equal(into.weight, before)


def test_globs_say_what_may_be_cast(tmp_path: Path) -> None:
    saved = nn.Linear(2, 2)
    holdfast.save(tmp_path / "run", {"m": saved}, 1)
    into = nn.Linear(2, 2).bfloat16()
    with pytest.raises(IncompatibleError, match=r"Under 1 name .* differ: 'm/bias': bfloat16 here"):
        holdfast.load(tmp_path / "run", {"m": into}, cast="m/weight")
    report = holdfast.load(tmp_path / "run", {"m": into}, cast=["m/weight", "m/b*"])
    assert report.cast == ("m/bias", "m/weight")
    assert torch.equal(into.weight, saved.weight.bfloat16())
    assert holdfast.load(tmp_path / "run", {"m": saved}, cast="m").cast == ()


def test_a_glob_that_matches_no_live_tensor_is_refused(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"m": nn.Linear(2, 2)}, 1)
    with pytest.raises(IncompatibleError, match=r"incompatible\.cast.*'m/wieght' \(did you mean 'm/weight'"):
        holdfast.load(tmp_path / "run", {"m": nn.Linear(2, 2)}, cast=["m/wieght", "m"])


def test_memory_of_any_strides_and_pieces_of_tensors_are_cast(tmp_path: Path) -> None:
    saved = values(torch.float32, 6, 8)
    holdfast.save(tmp_path / "run", {name: saved.clone() for name in "abc"}, 1)
    turned = torch.zeros(8, 6, dtype=torch.bfloat16)
    flat, box = torch.zeros(13, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.float64)
    into: dict[str, Any] = {
        "a": turned.T,
        "b": Piecewise((6, 8), [(FlatRange(5, 18), flat)]),
        "c": Piecewise((6, 8), [(Box((1, 4), (2, 3)), box)]),
    }
    assert holdfast.load(tmp_path / "run", into, cast=True).cast == ("a", "b", "c")
    assert torch.equal(turned.T, saved.bfloat16())
    assert torch.equal(flat, saved.view(-1)[5:18].bfloat16())
    assert torch.equal(box, saved[1:3, 4:7].double())


def test_many_small_tensors_are_cast_among_others_that_are_not(tmp_path: Path) -> None:
    saved = {str(i): values(torch.float32, 3, i % 5 + 1) for i in range(200)}
    holdfast.save(tmp_path / "run", saved, 1)
    into = {name: torch.zeros_like(one, dtype=FLOATS[int(name) % 4]) for name, one in saved.items()}
    holdfast.load(tmp_path / "run", into, cast=True)
    assert all(torch.equal(bits(into[name]), bits(one.to(into[name].dtype))) for name, one in saved.items())


def test_a_large_tensor_is_cast_block_by_block(tmp_path: Path) -> None:
    saved = values(torch.float32, 3000, 2001)
    holdfast.save(tmp_path / "run", {"w": saved}, 1)
    into = torch.zeros(3000, 2001, dtype=torch.bfloat16)
    report = holdfast.load(tmp_path / "run", {"w": into}, cast=True)
    assert torch.equal(into, saved.bfloat16())
    assert report.needed_nbytes == saved.nbytes


def trained(kind: Callable[..., Optimizer], dtype: torch.dtype) -> tuple[nn.Linear, Optimizer]:
    """A model that has taken one step of an optimizer of a class."""
    model = nn.Linear(2, 2).to(dtype)
    optimizer = kind(model.parameters())
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Linear, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 2, dtype=model.weight.dtype)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", [AdamW, NAdam])
@pytest.mark.parametrize(("saved", "here"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_the_step_of_adam_failed_after_a_cast_of_a_parameter_without_axes(
    tmp_path: Path, kind: Callable[..., Optimizer], saved: torch.dtype, here: torch.dtype
) -> None:
    def scale(dtype: torch.dtype) -> tuple[nn.ParameterDict, Optimizer]:
        model = nn.ParameterDict({"scale": torch.tensor(1.0, dtype=dtype)})
        optimizer = kind(model.parameters())
        return model, optimizer

    def step_of_scale(model: nn.ParameterDict, optimizer: Optimizer) -> None:
        model["scale"].grad = torch.ones_like(model["scale"])
        optimizer.step()

    model, optimizer = scale(saved)
    step_of_scale(model, optimizer)
    holdfast.save(tmp_path / "run", {"m": model, "o": optimizer}, 1)
    live, its_optimizer = scale(here)
    with pytest.raises(IncompatibleError, match=r"incompatible\.slot_dtype"):
        holdfast.load(tmp_path / "run", {"m": live, "o": its_optimizer}, cast="m")
    holdfast.load(tmp_path / "run", {"m": live, "o": its_optimizer}, cast=True)
    stored, found = optimizer.state[model["scale"]], its_optimizer.state[live["scale"]]
    assert torch.equal(bits(found["exp_avg"]), bits(stored["exp_avg"].to(here)))
    assert found["step"].dtype is stored["step"].dtype
    step_of_scale(live, its_optimizer)


def test_optimizer_state_keeps_the_dtype_that_it_was_stored_in(tmp_path: Path) -> None:
    model, optimizer = trained(partial(SGD, momentum=0.9), torch.float32)
    holdfast.save(tmp_path / "run", {"m": model, "o": optimizer}, 1)
    live, its_optimizer = trained(partial(SGD, momentum=0.9), torch.bfloat16)
    report = holdfast.load(tmp_path / "run", {"m": live, "o": its_optimizer}, cast="m")
    assert report.cast == ("m/bias", "m/weight")
    assert its_optimizer.state[live.weight]["momentum_buffer"].dtype is torch.float32
    step(live, its_optimizer)


@pytest.mark.parametrize("kind", [Adam, AdamW, Adamax, NAdam, RAdam])
@pytest.mark.parametrize(("saved", "here"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_the_step_of_adam_failed_after_a_cast_of_its_parameters_alone(
    tmp_path: Path, kind: Callable[..., Optimizer], saved: torch.dtype, here: torch.dtype
) -> None:
    model, optimizer = trained(kind, saved)
    holdfast.save(tmp_path / "run", {"m": model, "o": optimizer}, 1)
    live, its_optimizer = trained(kind, here)
    before = live.weight.detach().clone()
    with pytest.raises(IncompatibleError, match=r"incompatible\.slot_dtype.*o/state/m/\{bias, weight\}.*its next step"):
        holdfast.load(tmp_path / "run", {"m": live, "o": its_optimizer}, cast="m")
    assert torch.equal(live.weight, before)
    by_rule = [Cast("m", str(here).removeprefix("torch.")), Cast("o/state/**/exp_*", str(here).removeprefix("torch."))]
    for options in ({"cast": True}, {"cast": ["m", "o"]}, {"mapping": by_rule}):
        live, its_optimizer = trained(kind, here)
        holdfast.load(tmp_path / "run", {"m": live, "o": its_optimizer}, **options)
        stored = optimizer.state[model.weight]["exp_avg"]
        assert torch.equal(bits(its_optimizer.state[live.weight]["exp_avg"]), bits(stored.to(here)))
        step(live, its_optimizer)


@pytest.mark.parametrize(("saved", "live"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_the_step_of_lbfgs_failed_after_a_cast_that_left_its_history_in_the_old_dtype(
    tmp_path: Path, saved: str, live: str
) -> None:
    def trained(name: str, seed: int) -> tuple[nn.Linear, LBFGS]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2).to(getattr(torch, name))
        optimizer = LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=3)
        step(model, optimizer)
        return model, optimizer

    def step(model: nn.Linear, optimizer: Any) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            loss = model(torch.ones(4, 3, dtype=model.weight.dtype)).float().square().sum()
            loss.backward()
            return float(loss.detach())

        optimizer.step(closure)

    def tensors(optimizer: LBFGS) -> list[torch.Tensor]:
        (slots,) = optimizer.state.values()
        lists = [slot if isinstance(slot, list) else [slot] for _, slot in sorted(slots.items())]
        return [each for held in lists for each in held if isinstance(each, torch.Tensor)]

    model, optimizer = trained(saved, 0)
    holdfast.save(tmp_path / "run", {"m": model, "o": optimizer}, 1)
    into, its_optimizer = trained(live, 1)
    holdfast.load(tmp_path / "run", {"m": into, "o": its_optimizer}, cast=True)
    wanted = [tensor.to(getattr(torch, live)) for tensor in tensors(optimizer)]
    assert len(wanted) > 5
    for one, other in zip(tensors(its_optimizer), wanted, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)
    step(into, its_optimizer)


def test_a_cast_rule_leaves_integers_and_must_meet_the_live_dtype(tmp_path: Path) -> None:
    saved = nn.BatchNorm1d(3)
    holdfast.save(tmp_path / "run", {"m": saved}, 1)
    into = nn.BatchNorm1d(3).bfloat16()
    assert holdfast.load(tmp_path / "run", {"m": into}, mapping=[Cast("m", "bfloat16")]).cast == (
        "m/bias",
        "m/running_mean",
        "m/running_var",
        "m/weight",
    )
    assert into.num_batches_tracked is not None
    assert into.num_batches_tracked.dtype is torch.int64
    with pytest.raises(IncompatibleError, match=r"bfloat16 here, float16 in the checkpoint"):
        holdfast.load(tmp_path / "run", {"m": into}, mapping=[Cast("m", "float16")])


def test_tied_names_that_were_stored_apart_are_compared_after_the_cast(tmp_path: Path) -> None:
    one = values(torch.float32, 4)
    live = torch.zeros(4, dtype=torch.bfloat16)
    holdfast.save(tmp_path / "same", {"a": one, "b": one + 1e-6}, 1)
    holdfast.load(tmp_path / "same", {"a": live, "b": live}, cast=True)
    assert torch.equal(live, one.bfloat16())
    holdfast.save(tmp_path / "other", {"a": one, "b": one + 1}, 1)
    with pytest.raises(IncompatibleError, match=r"incompatible\.tied"):
        holdfast.load(tmp_path / "other", {"a": live, "b": live}, cast=True)
