"""This rank's state, and the descriptions of it that a save sends to the other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import xxhash

from holdfast.agreement.plan_messages import Compare, Described, Details, Digests, Questions
from holdfast.checkpoint.stored_checkpoint import pack_values
from holdfast.format import values as value_codec
from holdfast.geometry import Box
from holdfast.plan.body import RankLayout
from holdfast.plan.layout import Whole
from holdfast.state.flatten import FlatState
from holdfast.state.local_memory import LocalPieces, digest_of

#: Number of shares of the undeclared replicas; a save by a known plan compares one of them.
NUM_TURNS = 16


@dataclass(frozen=True)
class RankState:
    """One rank's state and layout. `number` is the rank's index among the ranks that save."""

    number: int
    flat: FlatState
    layout: RankLayout
    values: bytes
    _pieces: LocalPieces
    #: Digests made so far, by tensor name and part: the state does not change during a save.
    _digests: dict[str, dict[str, bytes]] = field(default_factory=dict)

    @staticmethod
    def of(flat: FlatState, *, number: int, rank: int) -> RankState:
        """Make the description of `flat`; `rank` is this process's rank in the job."""
        layout = RankLayout.of([tensor.layout for tensor in flat.tensors.values()], flat.aliases, flat.still)
        return RankState(number, flat, layout, value_codec.encode(flat.nodes), LocalPieces(rank))

    def describe(self, turn: int | None, *, plan_id: str, alone: bool) -> Described:
        """A summary of this rank's state. `turn` selects the share of tensors to compare (None: all), `plan_id` names
        the plan that this rank knows; with `alone`, there is no other rank to compare with."""
        own = self.flat.own_nodes
        compared = [] if alone else [part for name in self._replicas(turn) for part in self._digested(name).values()]
        return Described(
            layout=self.layout.digest,
            columns=xxhash.xxh3_128_digest(self.layout.columns) if self.layout.columns else b"",
            turn=turn,
            compared=xxhash.xxh3_128_digest(b"".join(compared)),
            values=xxhash.xxh3_128_digest(self.values),
            value_paths=_digest(self.flat.nodes),
            values_nbytes=8 + len(self.values),
            own_paths=_digest(own),
            own_nbytes=len(pack_values(own)) if own else 0,
            plan_id=plan_id,
            unmatched=dict(self.flat.unmatched),
        )

    def answer(self, questions: Questions) -> Details:
        """The details that rank 0 asks this rank for."""
        body = self.layout.body if self.number in questions.bodies else b""
        values = self.values if self.number in questions.values else b""
        columns = self.layout.columns if questions.bodies else b""
        return Details(body, columns, tuple(sorted(self.flat.own_nodes)), values)

    def compare(self, asked: Compare) -> Digests:
        """The digests of this rank's parts of the tensors that rank 0 asks for."""
        return tuple(self._digested(name) for name in asked.names)

    def _replicas(self, turn: int | None) -> Iterator[str]:
        """Names of the tensors that other ranks probably hold whole too, without a declaration; those of share `turn`,
        or (None) all."""
        compared = Whole("compare")
        for number, (name, tensor) in enumerate(self.flat.tensors.items()):
            if turn in (None, number % NUM_TURNS) and tensor.layout.spec == compared:
                yield name

    def _digested(self, name: str) -> dict[str, bytes]:
        """The digest of each part that this rank holds of a tensor, for comparison with other holders' copies. Empty
        for a tensor of which the lowest holder's copy is saved, because its copies may differ."""
        known = self._digests.get(name)
        if known is None:
            tensor = self.flat.tensors.get(name)
            known = self._digests[name] = {}
            if tensor is not None and tensor.layout.spec != Whole("first"):
                held = self._pieces.of(tensor.layout, tensor.memory)
                known |= {_extents(box): digest_of(view) for box, view in held}
        return known


def _extents(box: Box) -> str:
    return ",".join(f"{start}:{stop}" for start, stop in zip(box.start, box.stop, strict=True))


def _digest(names: Mapping[str, object]) -> bytes:
    return xxhash.xxh3_128_digest("\n".join(sorted(names)).encode("utf-8", "surrogatepass"))
