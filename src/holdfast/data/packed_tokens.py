"""Sources of shards: the samples of a dataset that a shard has, and token sequences of one length made of documents."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final, Generic, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from holdfast.data.data_identity import checked_length, checked_seed
from holdfast.data.permutation import Grids, samples_at
from holdfast.data.sharded_stream import ShardSource
from holdfast.options import checked_number

T_co = TypeVar("T_co", covariant=True)

Tokens = npt.NDArray[np.integer]

#: Samples whose numbers are computed at once.
_AT_ONCE: Final = 256
#: Documents without tokens that may follow each other.
_MAX_EMPTY: Final = 100_000


class Dataset(Protocol[T_co]):
    """A dataset whose samples have numbers from 0 on."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


class ShardOfDataset(Generic[T_co]):
    """The samples of a dataset that come in one shard, without end: in each epoch, every sample comes once in one of
    the shards, in an order that follows from `seed`."""

    def __init__(self, dataset: Dataset[T_co], *, shard: int, num_shards: int, seed: int = 0) -> None:
        self._dataset = dataset
        self._num_shards = checked_number("num_shards", num_shards, least=1, reason="a stream needs a shard")
        self._shard = checked_number("shard", shard, least=0, reason="shards are counted from 0")
        if self._shard >= self._num_shards:
            raise ValueError(f"shard is {shard}, but it must be less than num_shards, {num_shards}")
        self._seeds = np.array([checked_seed(seed)], dtype=np.uint64)
        self._grid = Grids.of([checked_length("the length of the dataset", len(dataset))])
        self._num_read = 0
        #: The numbers of the next samples.
        self._next: deque[int] = deque()

    def __next__(self) -> T_co:
        """The next sample."""
        if not self._next:
            numbers = np.arange(self._num_read, self._num_read + _AT_ONCE, dtype=np.uint64)
            places = numbers * np.uint64(self._num_shards) + np.uint64(self._shard)
            self._next.extend(samples_at(places, self._seeds, self._grid).tolist())
        self._num_read += 1
        return self._dataset[self._next.popleft()]

    def state_dict(self) -> dict[str, int]:
        """The number of samples that were read."""
        return {"num_read": self._num_read}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a state that `state_dict` returned."""
        self._num_read = state["num_read"]
        self._next.clear()


class PackedTokens:
    """Token sequences of one length, cut from documents one after another: where one ends, the next one follows.

    `documents` gives documents as one-dimensional arrays of whole numbers, and has a state, such as a `ShardOfDataset`.
    The state has the tokens that were read and not yet given.
    """

    def __init__(self, documents: ShardSource[Tokens], *, length: int) -> None:
        self._documents = documents
        self._length = checked_number("length", length, least=1, reason="a sequence needs a token")
        #: The tokens that were read and not yet given; None before the first document.
        self._tokens: Tokens | None = None

    def __next__(self) -> Tokens:
        """The next sequence."""
        parts = [] if self._tokens is None else [self._tokens]
        num_tokens = sum(part.size for part in parts)
        while num_tokens < self._length:
            parts.append(self._next_document())
            num_tokens += parts[-1].size
        tokens = np.concatenate(parts)
        if tokens.dtype.kind not in "iu":  # numpy makes floating-point numbers of int64 and uint64 together
            kinds = ", ".join(sorted({str(part.dtype) for part in parts}))
            raise TypeError(f"no dtype of whole numbers holds the tokens of all documents ({kinds}); cast them to one")
        self._tokens = tokens[self._length :]
        return tokens[: self._length]

    def _next_document(self) -> Tokens:
        """The next document that has tokens."""
        for _ in range(_MAX_EMPTY):
            document = _checked_document(next(self._documents))
            if document.size:
                return document
        raise ValueError(f"{_MAX_EMPTY:,} documents in a row have no tokens, so they make no sequence")

    def state_dict(self) -> dict[str, object]:
        """The state of the documents, and the tokens that were read and not yet given."""
        documents = self._documents.state_dict()
        if self._tokens is None:
            return {"documents": documents}
        return {"documents": documents, "tokens": self._tokens.tobytes(), "dtype": self._tokens.dtype.str}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from a state that `state_dict` returned."""
        self._documents.load_state_dict(state["documents"])
        self._tokens = None
        if "tokens" in state:
            dtype = np.dtype(cast("str", state["dtype"]))
            self._tokens = np.frombuffer(cast("bytes", state["tokens"]), dtype=dtype)


def _checked_document(document: Tokens) -> Tokens:
    tokens = np.array(document)  # a copy: the dataset may read the next document into the same memory
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise TypeError(
            f"a document must be a one-dimensional array of whole numbers, not of shape {tokens.shape} and dtype "
            f"{tokens.dtype}"
        )
    return tokens
