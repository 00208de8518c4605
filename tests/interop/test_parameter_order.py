"""The order of the parameters of an optimizer is found from shapes, only where one order fits."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.errors import HoldfastError, IncompatibleError
from holdfast.geometry import Shape
from holdfast.interop.parameter_order import OrderError, only_order

FIXTURE = Path(__file__).parent / "fixtures" / "deepspeed_experts" / "experts-without-zero-on-4.tar.xz"
SHAPES: st.SearchStrategy[Shape] = st.sampled_from([(2,), (3,), (2, 3)])


def orders(parameters: list[Shape], groups: list[list[Shape | None]]) -> Iterator[list[list[int]]]:
    """Every order that fits, by trial."""
    for chosen in product(range(-1, len(groups)), repeat=len(parameters)):
        found = [[number for number, group in enumerate(chosen) if group == each] for each in range(len(groups))]
        if all(
            len(numbers) == len(shapes)
            and all(shape in (None, parameters[number]) for number, shape in zip(numbers, shapes, strict=True))
            for numbers, shapes in zip(found, groups, strict=True)
        ):
            yield found


@given(st.lists(st.tuples(SHAPES, st.integers(-1, 1), st.booleans()), max_size=6))
def test_the_order_is_the_only_one_that_fits(drawn: list[tuple[Shape, int, bool]]) -> None:
    parameters = [shape for shape, _, _ in drawn]
    groups: list[list[Shape | None]] = [
        [shape if has_slots else None for shape, group, has_slots in drawn if group == number] for number in range(2)
    ]
    fitting = list(orders(parameters, groups))
    assert fitting
    if len(fitting) == 1:
        assert only_order(parameters, groups) == fitting[0]
    else:
        with pytest.raises(OrderError, match="several orders"):
            only_order(parameters, groups)


def test_groups_of_another_model_fit_in_no_order() -> None:
    with pytest.raises(OrderError, match="do not have the shapes"):
        only_order([(2,), (3,)], [[(3,), (2,)]])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder of DeepSpeed's experts without ZeRO: 4 ranks, of which pairs hold the same experts."""
    with tarfile.open(FIXTURE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "experts-without-zero-on-4"


def test_experts_without_zero_were_refused_because_no_file_names_their_parameters(saved: Path) -> None:
    held: dict[str, torch.Tensor] = torch.load(saved / "expected.pt", weights_only=False)["held"]
    view = holdfast.open(saved / "native")
    read = set()
    for key, tensor in held.items():
        name, kind = key.rsplit("/", 1)
        is_slot = kind.startswith("exp_avg")
        path = f"optimizer/state/model/{name}/{kind}" if is_slot else f"model/{name}"
        found = view[path][...]
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor), path
        read.add(path)
    assert all(name in read or name.endswith("/step") for name in view.names())
    tree: Any = view.tree()
    assert [group["weight_decay"] for group in tree["optimizer"]["param_groups"].values()] == [0.1, 0.0, 0.1, 0.0]
    assert all("moe" not in group for group in tree["optimizer"]["param_groups"].values())
    assert tree["client_state"] == {"epoch": 3}


OPTIMIZER = "native/global_step4/expp_rank_{}_mp_rank_00_optim_states.pt"


def test_a_lost_optimizer_file_of_experts_is_named(saved: Path) -> None:
    (saved / OPTIMIZER.format(1)).unlink()
    with pytest.raises(HoldfastError, match="lacks 1 optimizer file of 2 expert-parallel ranks") as caught:
        holdfast.open(saved / "native")
    assert caught.value.details == ("expp_rank_1_mp_rank_00_optim_states.pt",)


def test_a_lost_model_file_beside_those_of_experts_is_named(saved: Path) -> None:
    (saved / "native/global_step4/mp_rank_00_model_states.pt").unlink()
    with pytest.raises(HoldfastError, match=r"lacks mp_rank_00_model_states\.pt"):
        holdfast.open(saved / "native")


def changed(path: Path, change: Any) -> None:
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def test_an_optimizer_whose_parameters_could_be_others_is_refused(saved: Path) -> None:
    """The frozen weight of an expert has the shape of a trained one, so nothing tells whose moments they are."""
    for number in range(4):
        path = saved / f"native/global_step4/layer_0_expert_{number}_mp_rank_00_model_states.pt"

        def widen(content: dict[str, torch.Tensor]) -> None:
            for name in content:
                if name.endswith("frozen.weight"):
                    content[name] = torch.zeros(7, 5)

        changed(path, widen)
    with pytest.raises(IncompatibleError, match="by their order alone, and several orders"):
        holdfast.open(saved / "native")


def test_files_of_two_saves_without_zero_are_refused(saved: Path) -> None:
    def later(content: dict[str, Any]) -> None:
        for slots in content["optimizer"]["state"].values():
            slots["step"] += 1

    changed(saved / OPTIMIZER.format(1), later)
    with pytest.raises(HoldfastError, match="mixes files of several saves: rank 1 has done other steps"):
        holdfast.open(saved / "native")


def test_the_moments_of_one_rank_of_experts_were_read_as_those_of_another(saved: Path) -> None:
    first, second = (saved / OPTIMIZER.format(rank) for rank in (0, 1))
    first.write_bytes(second.read_bytes())
    with pytest.raises(HoldfastError, match=f"was saved as {second.name}, which is there, too"):
        holdfast.open(saved / "native")
