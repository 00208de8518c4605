"""Several datasets come in the shares of their weights, each of their samples once in an epoch of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import IncompatibleError
from holdfast.data import MixedOrder
from tests.data.test_global_order import Ahead

LENGTHS = {"web": 50, "code": 7, "books": 20}
WEIGHTS = {"web": 5, "code": 2, "books": 3}
#: The first sample of each source, as all of them are counted.
OFFSETS = {"web": 0, "code": 50, "books": 57}


def orders(world_size: int = 1, weights: Mapping[str, int] = WEIGHTS, *, batch: int = 120) -> list[MixedOrder]:
    return [
        MixedOrder(LENGTHS, weights=weights, global_batch_size=batch, seed=9, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]


def trained(ranks: list[MixedOrder], num_steps: int, depth: int = 0) -> list[int]:
    loops = [order.follow(Ahead(order, depth)) for order in ranks]
    return [sample for _ in range(num_steps) for loop in loops for sample in next(loop)]


def of_source(samples: list[int], name: str) -> list[int]:
    """The samples of one source, by their numbers in it."""
    first = OFFSETS[name]
    return [sample - first for sample in samples if first <= sample < first + LENGTHS[name]]


def require_even_use(samples: list[int]) -> None:
    """Each sample of a source came as often as any other, or once more."""
    for name, length in LENGTHS.items():
        counts = Counter(of_source(samples, name))
        assert max(counts.values()) - min(counts[number] for number in range(length)) <= 1


def test_each_round_has_as_many_samples_of_a_source_as_its_weight() -> None:
    samples = trained(orders(), 5)
    for start in range(0, len(samples), 10):
        here = samples[start : start + 10]
        assert {name: len(of_source(here, name)) for name in LENGTHS} == WEIGHTS
    require_even_use(samples)
    assert len({tuple(samples[start : start + 10]) for start in range(0, len(samples), 10)}) == len(samples) // 10


@settings(max_examples=30)
@given(
    lives=st.lists(
        st.tuples(st.sampled_from([8, 3, 5, 1]), *[st.integers(0, 4)] * 3, st.integers(0, 3)), min_size=1, max_size=6
    )
)
def test_a_job_that_is_killed_reweighted_and_goes_on_with_other_ranks_trains_on_the_samples_of_one_that_is_not(
    lives: list[tuple[int, int, int, int, int]],
) -> None:
    (whole,), state, kept = orders(), orders()[0].state_dict(), list[int]()
    all_samples = list[int]()
    for world_size, num_saved, num_lost, depth, code in lives:
        ranks, weights = orders(world_size), WEIGHTS | {"code": code}
        for order in ranks:
            order.load_state_dict(state)
            order.reweight(weights)
        kept += trained(ranks, num_saved, depth)
        state = ranks[0].state_dict()
        assert all(order.state_dict() == state for order in ranks)
        trained(ranks, num_lost, depth)  # killed before the next save
        whole.reweight(weights)
        all_samples += trained([whole], num_saved)
    assert kept == all_samples


def test_new_weights_hold_from_the_next_round_on_and_no_sample_is_lost() -> None:
    (order,) = orders(batch=4)
    batches = order.follow(Ahead(order, depth=3))
    samples = [sample for _ in range(3) for sample in next(batches)]
    order.reweight({"web": 0, "code": 1, "books": 1})
    assert order.weights == {"web": 0, "code": 1, "books": 1}
    samples += [sample for _ in range(47) for sample in next(batches)]
    assert {name: len(of_source(samples[:20], name)) for name in LENGTHS} == {
        name: 2 * weight for name, weight in WEIGHTS.items()
    }
    assert {name: len(of_source(samples[20:], name)) for name in LENGTHS} == {"web": 0, "code": 90, "books": 90}
    code = of_source(samples, "code")  # 4 + 90 samples: 13 epochs and 3 samples
    assert set(Counter(code).values()) <= {13, 14}


def test_weights_that_are_changed_at_the_start_or_before_they_hold_leave_no_trace() -> None:
    (order,), (other,) = orders(), orders()
    for weights in ({"web": 1, "code": 1, "books": 1}, {"web": 0, "code": 0, "books": 1}):
        order.reweight(weights)
    assert order.state_dict()["phases"] == [[0, [0, 0, 1]]]
    other.load_state_dict(order.state_dict())
    assert trained([order], 2) == trained([other], 2)
    (late,) = orders(batch=4)
    trained([late], 1)
    late.reweight({"web": 1, "code": 1, "books": 1})
    late.reweight({"web": 0, "code": 0, "books": 1})
    assert late.state_dict()["phases"] == [[0, [5, 2, 3]], [10, [0, 0, 1]]]


def test_all_weights_of_the_run_are_saved_and_loaded(tmp_path: Path) -> None:
    (order,), (other,) = orders(), orders()
    trained([order], 1)
    order.reweight({"web": 0, "code": 1, "books": 1})
    holdfast.save(tmp_path / "run", {"data": order}, 0)
    holdfast.load(tmp_path / "run", into={"data": other})
    assert (other.weights, other.position) == (order.weights, 120)
    assert trained([other], 3) == trained([order], 3)


def test_the_order_of_all_versions_is_this_one() -> None:
    first, second = [17, 13, 42, 38, 46, 56, 68, 60, 50, 74], [9, 55, 10, 64, 62, 4, 32, 28, 53, 71]
    assert trained(orders(batch=10), 2) == first + second


def test_other_weights_at_the_start_are_refused() -> None:
    with pytest.raises(IncompatibleError, match=r"weights: \[5, 2, 3\] in the checkpoint, \[1, 1, 1\] here"):
        orders(weights=dict.fromkeys(LENGTHS, 1))[0].load_state_dict(orders()[0].state_dict())


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ({"web": 1}, r"weights has \['web'\], but the sources are \['books', 'code', 'web'\]"),
        (WEIGHTS | {"code": -1}, "the weight of 'code' is -1, but a source cannot have less than no samples"),
        (dict.fromkeys(LENGTHS, 0), "the weights must have a sum from 1 to 4294967296, not 0"),
    ],
)
def test_weights_that_make_no_sense_are_refused(weights: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        orders(weights=weights)
    with pytest.raises(ValueError, match=text):
        orders()[0].reweight(weights)


def test_shares_are_whole_numbers() -> None:
    with pytest.raises(TypeError, match=r"the weight of 'web' must be a whole number, not a float: 0\.5"):
        orders(weights=WEIGHTS | {"web": 0.5})  # type: ignore[arg-type]


def test_lengths_without_names_and_what_is_no_loader_are_refused() -> None:
    with pytest.raises(TypeError, match="lengths has the number of samples of each source by its name, not a list"):
        MixedOrder([3, 4], weights={"web": 1}, global_batch_size=1)  # type: ignore[arg-type]
    order = MixedOrder({"web": 3}, weights={"web": 1}, global_batch_size=1)
    with pytest.raises(TypeError, match="follow takes a DataLoader whose batch_sampler is this order, not a NoneType"):
        order.follow(None)  # type: ignore[arg-type]
