"""Quantised tensors of torchao and bitsandbytes, on CPUs: saved, loaded in place and into fresh objects, on any ranks.

`make test-planes` runs these, in an environment of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.errors import StateError
from holdfast.mapping import Drop
from tests.project.test_guides import example, run_as_started
from tests.support.bound import bits
from tests.support.models import start_new_job
from tests.support.ranks import RanksFailedError, run_ranks

pytestmark = [
    pytest.mark.planes,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # of the libraries, about what they lack on a CPU
]

KINDS = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]
State = dict[str, Any]


@pytest.fixture(autouse=True)
def _eager() -> None:
    run_eagerly()


def run_eagerly() -> None:
    """torchao compiles its steps, which takes a minute; the same functions run without."""
    torch.compiler.set_stance("force_eager")


def build(kind: str, *, seed: int, steps: int, divided: bool = False) -> State:
    """A small model with an optimizer of torchao, after some steps: weights in blocks of rows and in blocks over rows
    (a convolution, and rows of 96 elements), and a bias that stays plain."""
    import torchao.optim

    torch.manual_seed(seed)
    layers = [nn.Linear(128, 128), nn.Linear(96, 256, bias=False), nn.Conv2d(64, 64, 3, bias=False)]
    model = nn.Sequential(*layers)
    if divided:
        fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizer = getattr(torchao.optim, kind)(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    train(state, steps=steps, seed=seed)
    return state


def train(state: State, *, steps: int, seed: int) -> None:
    """Steps with the same gradients on any number of ranks."""
    torch.manual_seed(seed)
    for _ in range(steps):
        for parameter in state["model"].parameters():
            gradient = torch.randn(parameter.shape)
            if isinstance(parameter, DTensor):
                from torch.distributed.tensor import distribute_tensor

                parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            else:
                parameter.grad = gradient
        state["optimizer"].step()


def stored(run: str) -> dict[str, bytes]:
    view = holdfast.open(run)
    return {name: bits(view[name][...]) for name in view.names()}


def slots_of(state: State) -> list[torch.Tensor]:
    kept = state["optimizer"].state.values()
    return [slots[name] for slots in kept for name in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "in place"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_of_torchao_goes_on_as_the_saved_one(tmp_path: Path, kind: str, steps: int) -> None:
    saved, into = build(kind, seed=0, steps=3), build(kind, seed=1, steps=steps)
    before = slots_of(into)
    holdfast.save(tmp_path / "run", saved, 0)
    holdfast.load(tmp_path / "run", into=into)
    after = slots_of(into)
    assert all(a is b for a, b in zip(before, after, strict=False))
    assert [type(slot) for slot in after] == [type(slot) for slot in slots_of(saved)]
    assert sum(type(slot) is not torch.Tensor for slot in after) == 6
    for state in (saved, into):
        train(state, steps=2, seed=5)
    holdfast.save(tmp_path / "a", saved, 1)
    start_new_job()
    holdfast.save(tmp_path / "b", into, 1)
    assert stored(str(tmp_path / "a")) == stored(str(tmp_path / "b"))


def save_trained(run: str, kind: str) -> None:
    run_eagerly()
    holdfast.save(run, build(kind, seed=0, steps=3, divided=True), 0)


def go_on(run: str, again: str, kind: str, steps: int, more: int) -> int:
    run_eagerly()
    into = build(kind, seed=1, steps=steps, divided=True)
    before = {id(slot) for slot in slots_of(into)}
    holdfast.load(run, into=into)
    after = {id(slot) for slot in slots_of(into)}
    train(into, steps=more, seed=9)
    holdfast.save(again, into, 1)
    return len(after - before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_under_fsdp2_goes_on_on_other_numbers_of_ranks(tmp_path: Path, kind: str) -> None:
    run, one, two, four = (str(tmp_path / name) for name in ("run", "one", "two", "four"))
    run_ranks(2, save_trained, run, kind)
    assert run_ranks(1, go_on, run, one, kind, 1, 0) == [0]
    assert run_ranks(1, go_on, one, four, kind, 0, 0) == [8]
    assert run_ranks(2, go_on, four, two, kind, 1, 0) == [0, 0]
    assert stored(one) == stored(run)
    assert stored(two) == stored(run)
    # Blocks do not meet, so training goes on with the same bits on any number of ranks.
    run_ranks(1, go_on, run, one + "-more", kind, 0, 2)
    run_ranks(2, go_on, run, two + "-more", kind, 0, 2)
    assert stored(one + "-more") == stored(two + "-more")


@pytest.mark.parametrize("kind", ["AdamW8bit"])
def test_ranks_whose_parts_are_too_small_for_blocks_are_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(3, save_trained, str(tmp_path / "run"), kind)
    (error, *_) = caught.value.by_rank.values()
    assert isinstance(error, StateError)
    assert error.code == "state.blocks"
    assert "Divide the tensor between blocks" in error.action


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"])
def test_quantised_weights_of_torchao_are_filled_in_place(tmp_path: Path, config: str) -> None:
    from torchao import quantization

    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(128, 64)).to(torch.bfloat16)
        quantization.quantize_(model, getattr(quantization, config)())
        models.append(model)
    first, second = models
    weight = cast("Any", second[0].weight)
    held = weight, weight.qdata
    holdfast.save(tmp_path / "run", {"model": first}, 0)
    holdfast.load(tmp_path / "run", into={"model": second})
    assert second[0].weight is held[0]
    assert weight.qdata is held[1]
    data = torch.randn(3, 128, dtype=torch.bfloat16)
    assert torch.equal(first(data), second(data))
    assert "model/0.weight/%plane=qdata" in holdfast.open(tmp_path / "run").names()


def test_the_example_of_the_guide_goes_on_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # as `run_eagerly`
    script, calls = example(Path(__file__).parents[2] / "docs/guides/quantised.md")
    (tmp_path / "train.py").write_text(script)
    for call in calls:
        printed = run_as_started(tmp_path, call)
        assert [line for line in printed if line in call.output] == call.output


def nf4(seed: int, *, is_trained: bool) -> Any:
    """A weight in 4 bits, whose context has the device, and whether it requires a gradient."""
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(seed))
    return to_nf4(weight.requires_grad_(is_trained), 64, 256)


def test_a_frozen_nf4_weight_loads_into_one_that_requires_a_gradient(tmp_path: Path) -> None:
    saved: Any = nn.Parameter(nf4(0, is_trained=False), requires_grad=False)
    into = nf4(1, is_trained=True)
    holdfast.save(tmp_path / "run", {"w": saved}, 0)
    holdfast.load(tmp_path / "run", {"w": into})
    assert bits(into.quantized_data) == bits(saved.quantized_data)
    assert bits(into.scaler_mean) == bits(saved.scaler_mean)
    assert torch.equal(into.get_original_weight(), saved.get_original_weight())


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit"])
def test_a_rule_that_drops_step_of_a_quantised_optimizer_is_refused(tmp_path: Path, kind: str) -> None:
    holdfast.save(tmp_path / "run", build(kind, seed=0, steps=1), 0)
    with pytest.raises(holdfast.IncompatibleError, match=r"incompatible\.needed_slots.*(?s:.*)need the slots step too"):
        holdfast.load(tmp_path / "run", build(kind, seed=1, steps=0), mapping=[Drop("optimizer/state/**/step")])


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "stepped"])
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_4_bit_slots_do_not_train_on_in_an_8_bit_optimizer(tmp_path: Path, strict: bool, steps: int) -> None:
    holdfast.save(tmp_path / "run", build("AdamW4bit", seed=0, steps=1), 0)
    into = build("AdamW8bit", seed=1, steps=steps)
    before = slots_of(into)
    with pytest.raises(holdfast.IncompatibleError, match=r"quantised, as .*OptimState4bit; .* here: ") as caught:
        holdfast.load(tmp_path / "run", into, strict=strict)
    assert caught.value.code == "incompatible.optimizer_class"
    assert "strict=False" not in caught.value.action
    assert all(a is b for a, b in zip(before, slots_of(into), strict=True))
    holdfast.load(tmp_path / "run", into, strict=strict, select="!optimizer")  # as the error says
    train(into, steps=1, seed=2)


def test_classes_with_the_same_quantised_slots_exchange_state_once_their_slots_show(tmp_path: Path) -> None:
    saved, into = build("Adam8bit", seed=0, steps=1), build("AdamW8bit", seed=1, steps=0)
    holdfast.save(tmp_path / "run", saved, 0)
    with pytest.raises(holdfast.IncompatibleError, match=r"quantised slots here: unknown, until it has taken a step"):
        holdfast.load(tmp_path / "run", into, strict=False)
    train(into, steps=1, seed=1)
    holdfast.load(tmp_path / "run", into, strict=False)
    for mine, theirs in zip(slots_of(into), slots_of(saved), strict=True):
        assert bits(getattr(mine, "codes", mine)) == bits(getattr(theirs, "codes", theirs))


# --- bitsandbytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "in place"])
@pytest.mark.parametrize("kind", ["AdamW8bit", "Lion8bit"])
def test_an_8_bit_optimizer_of_bitsandbytes_goes_on_as_the_saved_one(tmp_path: Path, kind: str, steps: int) -> None:
    import bitsandbytes

    states: list[State] = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 8))
        optimizer = getattr(bitsandbytes.optim, kind)(model.parameters(), lr=0.01)
        states.append({"model": model, "optimizer": optimizer})
        train(states[-1], steps=3 if seed == 0 else steps, seed=seed)
    saved, into = states
    before = [slots.get("state1") for slots in into["optimizer"].state.values()]
    holdfast.save(tmp_path / "run", saved, 0)
    holdfast.load(tmp_path / "run", into=into)
    after = [slots["state1"] for slots in into["optimizer"].state.values()]
    assert all(a is b for a, b in zip(before, after, strict=False))
    assert after[0].dtype == torch.uint8
    for state in (saved, into):
        train(state, steps=2, seed=5)
    for a, b in zip(saved["model"].parameters(), into["model"].parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "stepped"])
def test_8_bit_slots_of_bitsandbytes_do_not_train_on_in_a_32_bit_optimizer(tmp_path: Path, steps: int) -> None:
    import bitsandbytes

    states: list[State] = []
    for number, kind in enumerate((bitsandbytes.optim.AdamW8bit, bitsandbytes.optim.AdamW)):
        torch.manual_seed(number)
        model = nn.Linear(128, 64)
        states.append({"model": model, "optimizer": kind(model.parameters(), lr=0.01)})
        train(states[-1], steps=1 if number == 0 else steps, seed=number)
    saved, into = states
    holdfast.save(tmp_path / "run", saved, 0)
    with pytest.raises(holdfast.IncompatibleError, match=r"quantised, as uint8; .* here: (none|unknown)") as caught:
        holdfast.load(tmp_path / "run", into, strict=False)
    assert caught.value.code == "incompatible.optimizer_class"
    assert all(slots["state1"].dtype == torch.float32 for slots in into["optimizer"].state.values())
    with pytest.raises(holdfast.IncompatibleError, match=r"need the slots step too"):
        holdfast.load(tmp_path / "run", saved, mapping=[Drop("optimizer/state/**/step")])


def test_the_log_says_that_an_8_bit_optimizer_of_bitsandbytes_goes_on_with_slots_of_32_bits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import bitsandbytes

    states: list[State] = []
    for kind in (bitsandbytes.optim.AdamW, bitsandbytes.optim.AdamW8bit):
        model = nn.Linear(128, 64)
        states.append({"model": model, "optimizer": kind(model.parameters(), lr=0.01)})
    train(states[0], steps=1, seed=0)
    holdfast.save(tmp_path / "run", states[0], 0)
    holdfast.load(tmp_path / "run", states[1], strict=False)
    assert "is of class AdamW8bit here, and gets the state of AdamW, with slots of float32" in caplog.text
    train(states[1], steps=1, seed=1)
    assert all(slots["state1"].dtype == torch.float32 for slots in states[1]["optimizer"].state.values())


def four_bits(seed: int, **options: Any) -> Any:
    import bitsandbytes

    torch.manual_seed(seed)
    layers = nn.Sequential(bitsandbytes.nn.Linear4bit(128, 64, **options), nn.Linear(64, 8))
    return layers.to("cpu")  # quantises


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_4_bit_weights_of_bitsandbytes_are_filled_in_place(tmp_path: Path, kind: str, nested: bool) -> None:
    options = {"quant_type": kind, "compress_statistics": nested, "compute_dtype": torch.float32}
    first, second = four_bits(0, **options), four_bits(1, **options)
    held = second[0].weight, second[0].weight.quant_state.absmax, second[0].weight.data_ptr()
    holdfast.save(tmp_path / "run", {"model": first}, 0)
    holdfast.load(tmp_path / "run", into={"model": second})
    assert second[0].weight is held[0]
    assert second[0].weight.quant_state.absmax is held[1]
    assert second[0].weight.data_ptr() == held[2]
    assert type(second[0].weight).__name__ == "Params4bit"
    data = torch.randn(3, 128)
    assert torch.equal(first(data), second(data))


def test_4_bit_weights_of_another_block_do_not_fill(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"model": four_bits(0, quant_type="nf4")}, 0)
    with pytest.raises(holdfast.IncompatibleError, match=r"incompatible\.kind.*fp4.*nf4"):
        holdfast.load(tmp_path / "run", into={"model": four_bits(1, quant_type="fp4")})


def test_8_bit_weights_of_bitsandbytes_are_refused_and_others_beside_them_saved(tmp_path: Path) -> None:
    import bitsandbytes

    model = nn.Sequential(bitsandbytes.nn.Linear8bitLt(128, 64, has_fp16_weights=False), nn.Linear(64, 8)).to("cpu")
    with pytest.raises(StateError, match=r"state\.module_hooks.*keeps the scales of its weight outside of it"):
        holdfast.save(tmp_path / "run", {"model": model}, 0)
    assert holdfast.save(tmp_path / "run", {"model": model}, 0, select="model/1.**").num_tensors == 2
