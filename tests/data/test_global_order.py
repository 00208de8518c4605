"""Any number of ranks continues one order of samples, and every sample comes once in each epoch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import holdfast
from holdfast import ConfigurationError, IncompatibleError
from holdfast.data import GlobalOrder
from holdfast.data.batch_order import BatchOrder

BATCH = 120


def orders(world_size: int, length: int = 1000, *, batch: int = BATCH, fingerprint: str = "") -> list[GlobalOrder]:
    return [
        GlobalOrder(length, global_batch_size=batch, rank=rank, world_size=world_size, seed=5, fingerprint=fingerprint)
        for rank in range(world_size)
    ]


class Ahead:
    """A loader that draws `depth` batches before it gives the first one, as workers do."""

    def __init__(self, order: BatchOrder, depth: int) -> None:
        self.order, self.depth = order, depth

    def __iter__(self) -> Iterator[list[int]]:
        batches = iter(self.order)
        drawn = list(islice(batches, self.depth))
        while True:
            drawn.append(next(batches))
            yield drawn.pop(0)


def loader_of(
    order: GlobalOrder | None, length: int = 1000, *, num_workers: int = 0, in_order: bool = True
) -> DataLoader[torch.Tensor]:
    numbers: Any = torch.arange(length)  # not a Dataset, but one that loaders take
    return DataLoader(numbers, batch_sampler=order, num_workers=num_workers, in_order=in_order)


def trained(ranks: list[GlobalOrder], num_steps: int, depth: int = 0) -> list[int]:
    """The samples that a job trains on in its next steps: those of each global batch in the order of the ranks."""
    loops = [order.follow(Ahead(order, depth)) for order in ranks]
    return [sample for _ in range(num_steps) for loop in loops for sample in next(loop)]


@given(length=st.integers(1, 200), num_epochs=st.integers(1, 4))
def test_every_epoch_has_every_sample_once(length: int, num_epochs: int) -> None:
    samples = trained(orders(3, length, batch=6), -(-length * num_epochs // 6))
    for epoch in range(num_epochs):
        assert sorted(samples[epoch * length : (epoch + 1) * length]) == list(range(length))


@settings(max_examples=50)
@given(
    length=st.integers(1, 2000),
    lives=st.lists(st.tuples(st.sampled_from([8, 3, 5, 1, 2]), *[st.integers(0, 9)] * 3), min_size=1, max_size=6),
)
def test_a_job_that_is_killed_and_goes_on_with_other_ranks_trains_on_the_samples_of_one_that_is_not(
    length: int, lives: list[tuple[int, int, int, int]]
) -> None:
    state, kept = orders(1, length)[0].state_dict(), list[int]()
    for world_size, num_saved, num_lost, depth in lives:
        ranks = orders(world_size, length)
        for order in ranks:
            order.load_state_dict(state)
        kept += trained(ranks, num_saved, depth)
        assert all(order.state_dict() == ranks[0].state_dict() for order in ranks)
        state = ranks[0].state_dict()
        trained(ranks, num_lost, depth)  # killed before the next save
    assert kept == trained(orders(1, length), len(kept) // BATCH)


def test_another_size_of_batches_goes_on_with_the_next_sample() -> None:
    whole = trained(orders(1), 5)
    (before,), (after,) = orders(1), orders(1, batch=60)
    first = trained([before], 2)
    after.load_state_dict(before.state_dict())
    assert first + trained([after], 6) == whole
    assert (after.position, after.epoch) == (600, 0)


def test_batches_that_were_drawn_ahead_and_not_trained_on_come_again_after_a_break() -> None:
    (order,) = orders(1)
    samples = [sample for _ in range(4) for sample in trained([order], 1, depth=7)]
    assert samples == trained(orders(1), 4)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_goes_on_at_the_loaded_position_in_the_same_loop(num_workers: int) -> None:
    (order,) = orders(1)
    batches = order.follow(loader_of(order, num_workers=num_workers))
    first = [next(batches).tolist() for _ in range(2)]
    state = order.state_dict()
    lost = [next(batches).tolist() for _ in range(3)]
    assert (state["position"], order.position) == (2 * BATCH, 5 * BATCH)
    order.load_state_dict(state)
    again = [next(batches).tolist() for _ in range(4)]
    assert again[:3] == lost
    assert [sample for batch in first + again for sample in batch] == trained(orders(1), 6)


def test_an_order_is_saved_and_loaded_as_it_is(tmp_path: Path) -> None:
    (order,), (other,) = orders(1), orders(1)
    samples = trained([order], 3, depth=4)
    holdfast.save(tmp_path / "run", {"data": order}, 2)
    holdfast.load(tmp_path / "run", into={"data": other})
    assert samples + trained([other], 2) == trained(orders(1), 5)


@pytest.mark.parametrize(
    ("other", "what"), [(orders(1, 1001), "length"), (orders(1, fingerprint="second"), "fingerprint")]
)
def test_a_changed_dataset_is_refused_and_nothing_changes(other: list[GlobalOrder], what: str) -> None:
    (order,) = orders(1, fingerprint="" if what == "length" else "first")
    trained([order], 2)
    before = order.state_dict()
    with pytest.raises(IncompatibleError, match=rf"(?s)incompatible\.dataset.*{what}: .*leave the data out") as caught:
        order.load_state_dict(other[0].state_dict())
    assert (caught.value.code, order.state_dict()) == ("incompatible.dataset", before)


def test_an_iterator_of_the_users_own_that_began_before_a_load_is_refused() -> None:
    (order,) = orders(1)
    batches = iter(order)
    next(batches)
    order.advance()
    order.load_state_dict(order.state_dict())
    next(batches)
    with pytest.raises(ConfigurationError, match=r"config\.batch.*start a new iteration"):
        order.advance()


def test_two_iterations_at_a_time_are_refused() -> None:
    (order,) = orders(1)
    loops = [order.follow(loader_of(order)) for _ in range(2)]
    next(loops[0])
    next(loops[1])
    with pytest.raises(ConfigurationError, match=r"config\.batch.*one loader at a time"):
        next(loops[0])


def test_a_loader_with_another_batch_sampler_is_refused() -> None:
    (order,) = orders(1)
    with pytest.raises(ValueError, match="batch_sampler of the loader is not this order"):
        order.follow(loader_of(None))


def test_a_loader_of_another_dataset_is_refused_before_its_first_batch() -> None:
    (order,) = orders(1)
    with pytest.raises(ValueError, match="999 samples, but the order has 1,000; make the order with the length"):
        order.follow(loader_of(order, 999))


def test_a_loader_that_gives_batches_in_any_order_is_refused() -> None:
    (order,) = orders(1)
    loader = loader_of(order, num_workers=2, in_order=False)
    with pytest.raises(ValueError, match="make the loader with in_order=True"):
        order.follow(loader)


def test_a_plain_process_is_the_whole_job_and_one_of_several_ranks_needs_its_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert next(iter(GlobalOrder(1000, global_batch_size=BATCH, seed=5))) == next(iter(orders(1)[0]))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match=r"config\.no_process_group.*init_process_group first"):
        GlobalOrder(1000, global_batch_size=BATCH)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"length": 0}, "length is 0, but an order needs a sample"),
        ({"length": 1 << 63}, "an order has at most 4611686018427387904 samples"),
        ({"global_batch_size": 0}, "global_batch_size is 0, but a batch needs a sample"),
        ({"world_size": 7}, "global_batch_size is 120, no multiple of 7 ranks.*119 is one"),
        ({"rank": 2}, "rank is 2, but it must be less than world_size, 2"),
        ({"rank": None}, "give both rank and world_size, or neither"),
        ({"seed": -1}, "seed is -1, but seeds are not negative"),
        ({"seed": 1 << 64}, "but seeds have at most 64 bits"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(options: dict[str, int], text: str) -> None:
    valid: dict[str, Any] = {"length": 1000, "global_batch_size": BATCH, "rank": 0, "world_size": 2} | options
    with pytest.raises(ValueError, match=text):
        GlobalOrder(valid.pop("length"), **valid)


@pytest.mark.parametrize("options", [{"length": "10"}, {"global_batch_size": 1.0}, {"fingerprint": 7}])
def test_options_of_another_type_are_refused(options: dict[str, int]) -> None:
    valid: dict[str, Any] = {"length": 1000, "global_batch_size": BATCH} | options
    with pytest.raises(TypeError, match=f"{next(iter(options))} must be a "):
        GlobalOrder(valid.pop("length"), **valid)


def test_a_followed_loader_leaves_torchs_generator_alone() -> None:
    """A resumed job with dropout went on with other random numbers, because its loader had drawn one once more."""
    order = GlobalOrder(100, global_batch_size=4, seed=1)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    numbers: Any = range(100)
    batches = order.follow(DataLoader(numbers, batch_sampler=order, num_workers=1))
    next(batches)
    assert torch.equal(torch.get_rng_state(), before)
    own = torch.Generator()
    order = GlobalOrder(100, global_batch_size=4, seed=1)
    loader = DataLoader(numbers, batch_sampler=order, generator=own)
    order.follow(loader)
    assert loader.generator is own
