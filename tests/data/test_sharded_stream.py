"""Ranks share out the shards of a stream, and any number of them goes on with the same samples, buffers included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import holdfast
from holdfast import ConfigurationError, IncompatibleError
from holdfast.data import PackedTokens, ShardedStream, ShardOfDataset
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks

NUM_SHARDS, BATCH, LENGTH = 240, 120, 16
#: Documents of other lengths, each of which has its number as all of its tokens.
DOCUMENTS = [np.full(1 + number * 7 % 40, number, dtype=np.uint16) for number in range(500)]


def open_shard(shard: int) -> PackedTokens:
    return PackedTokens(ShardOfDataset(DOCUMENTS, shard=shard, num_shards=NUM_SHARDS, seed=3), length=LENGTH)


class Counting:
    """A shard whose samples say where they come from."""

    def __init__(self, shard: int) -> None:
        self.shard, self.number = shard, 0

    def __next__(self) -> tuple[int, int]:
        self.number += 1
        return self.shard, self.number

    def state_dict(self) -> int:
        return self.number

    def load_state_dict(self, state: int) -> None:
        self.number = state


def streams(world_size: int, *, batch: int = BATCH, fingerprint: str = "") -> list[ShardedStream]:
    return [
        ShardedStream(
            open_shard,
            num_shards=NUM_SHARDS,
            global_batch_size=batch,
            fingerprint=fingerprint,
            rank=rank,
            world_size=world_size,
        )
        for rank in range(world_size)
    ]


def loader_of(stream: ShardedStream, num_workers: int = 0) -> DataLoader[object]:
    return DataLoader(stream, batch_size=None, num_workers=num_workers)


def next_batch(batches: Iterator[object]) -> list[list[int]]:
    batch = next(batches)
    assert isinstance(batch, torch.Tensor)
    found: list[list[int]] = batch.tolist()
    return found


def trained(ranks: list[ShardedStream], num_steps: int, depth: int = 0) -> list[list[int]]:
    """The sequences that a job trains on in its next steps, in the order of their places."""
    found: list[list[int]] = []
    loops = [stream.follow(Ahead(stream, depth)) for stream in ranks]
    for _ in range(num_steps):
        batches = [next_batch(loop) for loop in loops]
        found += [sequence for together in zip(*batches, strict=True) for sequence in together]
    return found


class Ahead:
    """A loader that draws `depth` batches before it gives the first one, as workers do."""

    def __init__(self, stream: ShardedStream, depth: int) -> None:
        self.stream, self.depth = stream, depth

    def __iter__(self) -> Iterator[list[object]]:
        batches = iter(loader_of(self.stream))
        drawn = [next(batches) for _ in range(self.depth)]
        while True:
            drawn.append(next(batches))
            yield drawn.pop(0)


def state_of(ranks: list[ShardedStream], num_shards: int = NUM_SHARDS) -> tuple[object, dict[int, object]]:
    """The state of a job, as holdfast puts it together."""
    positions = [stream.state["position"].state_dict() for stream in ranks]  # type: ignore[attr-defined]
    assert all(position == positions[0] for position in positions)
    shards: dict[int, object] = {}
    for stream in ranks:
        own = stream.state["shards"]
        assert isinstance(own, dict)
        shards |= {shard: progress.state_dict() for shard, progress in own.items()}
    assert shards.keys() == set(range(num_shards))
    return positions[0], shards


def load(ranks: list[ShardedStream], state: tuple[object, dict[int, object]]) -> None:
    for stream in ranks:
        stream.state["position"].load_state_dict(state[0])  # type: ignore[attr-defined]
        own = stream.state["shards"]
        assert isinstance(own, dict)
        for shard, progress in own.items():
            progress.load_state_dict(state[1][shard])


@settings(max_examples=10)
@given(
    lives=st.lists(st.tuples(st.sampled_from([8, 3, 5, 1]), *[st.integers(0, 3)] * 3), min_size=1, max_size=4),
)
def test_a_job_that_is_killed_and_goes_on_with_other_ranks_trains_on_the_sequences_of_one_that_is_not(
    lives: list[tuple[int, int, int, int]],
) -> None:
    state, kept = state_of(streams(1)), list[list[int]]()
    for world_size, num_saved, num_lost, depth in lives:
        ranks = streams(world_size)
        load(ranks, state)
        kept += trained(ranks, num_saved, depth)
        state = state_of(ranks)
        trained(ranks, num_lost, depth)  # killed before the next save
    assert kept == trained(streams(1), len(kept) // BATCH)


def test_no_token_is_lost_or_doubled_by_packing() -> None:
    tokens = np.array(trained(streams(1), 12)).reshape(-1, NUM_SHARDS, LENGTH)
    for shard in range(NUM_SHARDS):
        documents = ShardOfDataset(DOCUMENTS, shard=shard, num_shards=NUM_SHARDS, seed=3)
        whole = np.concatenate([next(documents) for _ in range(200)])
        assert (tokens[:, shard].ravel() == whole[: 6 * LENGTH]).all()


def test_every_epoch_has_every_sample_in_one_of_the_shards() -> None:
    shards = [ShardOfDataset(range(100), shard=shard, num_shards=8, seed=1) for shard in range(8)]
    samples = [next(shards[place % 8]) for place in range(300)]
    assert [Counter(samples[start : start + 100]) for start in (0, 100, 200)] == [Counter(range(100))] * 3


def test_another_size_of_batches_goes_on_with_the_shards_where_they_are() -> None:
    before, after = streams(3), streams(5, batch=60)
    kept = trained(before, 1)
    load(after, state_of(before))
    kept += trained(after, 2)
    assert kept == trained(streams(1), 2)


def test_ranks_go_on_at_a_position_that_is_no_multiple_of_their_number() -> None:
    def made(world_size: int) -> list[ShardedStream]:
        return [
            ShardedStream(Counting, num_shards=6, global_batch_size=world_size, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]

    def numbered(ranks: list[ShardedStream], num_steps: int) -> list[tuple[int, int]]:
        loops = [stream.follow(loader_of(stream)) for stream in ranks]
        batches: list[Any] = [next(loop) for _ in range(num_steps) for loop in loops]
        return [(int(shard), int(number)) for shard, number in batches]  # of one sample each

    before, after = made(2), made(3)
    samples = numbered(before, 2)
    position, shards = state_of(before, num_shards=6)
    load(after, (position, shards))
    samples += numbered(after, 2)
    # Places 0 to 9: shards 0 to 5, and once more 0 to 3.
    assert sorted(samples) == sorted((place % 6, 1 + place // 6) for place in range(10))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_goes_on_at_the_loaded_position_in_the_same_loop(num_workers: int) -> None:
    (stream,) = streams(1)
    batches = stream.follow(loader_of(stream, num_workers))
    first = [next_batch(batches) for _ in range(3)]
    state = state_of([stream])
    lost = [next_batch(batches) for _ in range(2)]
    load([stream], state)
    again = [next_batch(batches) for _ in range(3)]
    assert again[:2] == lost
    assert [sequence for batch in first + again for sequence in batch] == trained(streams(1), 6)


class Walking:
    """A shard whose state has tensors of several kinds, nested."""

    def __init__(self, _: int) -> None:
        self.kept: dict[str, Any] = {
            "half": [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(0)],
            "at": torch.tensor(0),
        }

    def __next__(self) -> int:
        self.kept = {"half": [self.kept["half"][0] + 1, torch.zeros(0)], "at": self.kept["at"] + 1}
        return int(self.kept["at"])

    def state_dict(self) -> object:
        return self.kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state


def test_states_with_tensors_keep_no_file_open_for_each_shard_of_a_loader_with_workers() -> None:
    """Each tensor kept a file of shared memory, until the process had as many as it may ("Too many open files")."""
    stream = ShardedStream(Walking, num_shards=60, global_batch_size=10)
    batches = stream.follow(loader_of(stream, num_workers=2))
    next(batches)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(7):
        next(batches)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 5
    shards: dict[int, Any] = dict(state_of([stream], num_shards=60)[1])
    first, last = shards[0]["source"], shards[59]["source"]
    assert (first["at"], last["at"]) == (2, 1)
    assert first["half"][0].tolist() == [2.0] * 3
    assert [tensor.dtype for tensor in first["half"]] == [torch.bfloat16, torch.float32]


def save_or_load(run: str, num_steps: int) -> list[list[list[int]]]:
    """Go on from the run, train, and save: this rank's batches."""
    start_new_job()
    stream = ShardedStream(open_shard, num_shards=NUM_SHARDS, global_batch_size=BATCH)
    state = {"data": stream.state}
    if Path(run).exists():
        holdfast.load(run, into=state)
    batches = stream.follow(loader_of(stream))
    found = [next_batch(batches) for _ in range(num_steps)]
    holdfast.save(run, state, stream.position)
    return found


def test_each_rank_loads_the_shards_that_it_reads_from_a_save_of_other_ranks(tmp_path: Path) -> None:
    kept: list[list[int]] = []
    for world_size, num_steps in ((3, 2), (2, 1), (5, 2)):
        found = run_ranks(world_size, save_or_load, str(tmp_path / "run"), num_steps)
        kept += [
            sequence
            for batches in zip(*found, strict=True)
            for together in zip(*batches, strict=True)
            for sequence in together
        ]
    assert kept == trained(streams(1), 5)
    assert holdfast.open(tmp_path / "run").value("data/position") == {
        "version": 1, "num_shards": NUM_SHARDS, "fingerprint": "", "position": 5 * BATCH
    }  # fmt: skip


@pytest.mark.parametrize(
    ("num_shards", "fingerprint", "what"),
    [(480, "", "data/shards"), (120, "", "data/shards"), (240, "b", "fingerprint")],
)
def test_another_stream_is_refused(num_shards: int, fingerprint: str, what: str, tmp_path: Path) -> None:
    def stream(num_shards: int, fingerprint: str) -> Mapping[str, object]:
        made = ShardedStream(Counting, num_shards=num_shards, global_batch_size=BATCH, fingerprint=fingerprint)
        return {"data": made.state}

    holdfast.save(tmp_path / "run", stream(240, ""), 0)
    with pytest.raises(IncompatibleError, match=what):
        holdfast.load(tmp_path / "run", into=stream(num_shards, fingerprint))


def test_workers_that_would_share_a_shard_are_refused() -> None:
    stream = ShardedStream(Counting, num_shards=BATCH, global_batch_size=BATCH)
    batches = stream.follow(loader_of(stream, num_workers=2))
    with pytest.raises(RuntimeError, match=r"2 workers cannot share 120 shards.*a number of workers that divides 1"):
        next(batches)


def test_workers_that_outlive_a_load_are_refused() -> None:
    (stream,) = streams(1)
    loader = DataLoader(stream, batch_size=None, num_workers=2, persistent_workers=True)
    with pytest.raises(ValueError, match="persistent_workers=False"):
        stream.follow(loader)


def test_a_loader_that_batches_anew_is_refused() -> None:
    (stream,) = streams(1)
    loader = DataLoader(stream, batch_size=2, collate_fn=lambda items: items)
    with pytest.raises(ValueError, match="batch_size=None"):
        stream.follow(loader)


def test_an_iterator_of_the_users_own_that_began_before_a_load_is_refused() -> None:
    (stream,) = streams(1)
    batches = iter(loader_of(stream))
    loop = stream.follow(batches)
    state = state_of([stream])
    next(loop)
    load([stream], state)
    with pytest.raises(ConfigurationError, match=r"config\.batch.*start a new iteration"):
        next(loop)


def test_a_shard_that_ends_is_refused() -> None:
    class Ending(Counting):
        def __next__(self) -> tuple[int, int]:
            raise StopIteration

    stream = ShardedStream(Ending, num_shards=4, global_batch_size=2)
    with pytest.raises(ConfigurationError, match=r"config\.shards.*Shard 0 of the stream ended"):
        next(iter(stream))


def test_shards_that_a_batch_does_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="num_shards is 7, no multiple of global_batch_size, 2"):
        ShardedStream(Counting, num_shards=7, global_batch_size=2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ShardOfDataset(DOCUMENTS, shard=8, num_shards=8),
        lambda: ShardOfDataset([], shard=0, num_shards=8),
        lambda: PackedTokens(open_shard(0), length=0),
    ],
)
def test_numbers_of_shards_that_make_no_sense_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"must be less than num_shards|needs a (sample|token)"):
        make()


def test_documents_that_are_no_tokens_are_refused() -> None:
    documents: list[Any] = [np.ones(5)]
    packed = PackedTokens(ShardOfDataset(documents, shard=0, num_shards=1), length=4)
    with pytest.raises(
        TypeError, match=r"one-dimensional array of whole numbers, not of shape \(5,\) and dtype float64"
    ):
        next(packed)


class OneBuffer:
    """Documents that are all read into the same memory."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts, self._memory = texts, np.zeros(8, np.uint16)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Any:
        text = self._texts[index]
        self._memory[: len(text)] = text
        return self._memory[: len(text)]


def test_documents_in_one_buffer_do_not_overwrite_each_other() -> None:
    packed = PackedTokens(ShardOfDataset(OneBuffer([(1, 1), (2, 2), (3, 3)]), shard=0, num_shards=1), length=6)
    assert sorted(next(packed).tolist()) == [1, 1, 2, 2, 3, 3]


def test_documents_whose_dtypes_have_no_common_dtype_of_whole_numbers_are_refused() -> None:
    """The sequence had floating-point numbers, in which large tokens are equal."""
    documents = [np.ones(3, np.int64), np.ones(3, np.uint64)]
    packed = PackedTokens(ShardOfDataset(documents, shard=0, num_shards=1), length=6)
    with pytest.raises(TypeError, match=r"tokens of all documents \(int64, uint64\); cast them to one"):
        next(packed)


def test_a_shard_without_tokens_is_refused_instead_of_read_for_ever() -> None:
    packed = PackedTokens(ShardOfDataset([np.ones(0, np.int64)], shard=0, num_shards=1), length=6)
    with pytest.raises(ValueError, match="100,000 documents in a row have no tokens"):
        next(packed)
