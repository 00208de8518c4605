"""This rank's state as a save describes it to the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import xxhash

from holdfast.format import values as value_codec
from holdfast.geometry import Box
from holdfast.plan.body import RankLayout
from holdfast.plan.layout import Placed, Whole
from holdfast.run.checkpoint import pack_values
from holdfast.saving.messages import Described, Details, Questions
from holdfast.state.flatten import FlatState, flatten
from holdfast.state.memory import LocalPieces, digest_of

#: Later saves compare one of so many parts of the undeclared replicas.
NUM_TURNS = 16


@dataclass(frozen=True)
class Local:
    """This rank's state and layout."""

    flat: FlatState
    layout: RankLayout
    values: bytes
    world_size: int

    @staticmethod
    def of(state: Mapping[str, object], *, rank: int, world_size: int) -> Local:
        """Flatten `state`. Raises `StateError` for what cannot be saved."""
        flat = flatten(state, rank=rank, world_size=world_size)
        layout = RankLayout.of([tensor.layout for tensor in flat.tensors.values()], flat.aliases)
        return Local(flat, layout, value_codec.encode(flat.nodes), world_size)

    def describe(self, turn: int | None, *, alone: bool) -> bytes:
        """`Described`, encoded. `turn` selects the share of tensors to compare (None: all); `alone`: there is nobody to
        compare with."""
        own = self.flat.own_nodes
        compared = b"" if alone else xxhash.xxh3_128_digest(b"".join(self.compared(turn).values()))
        described = Described(
            layout=self.layout.digest,
            columns=xxhash.xxh3_128_digest(self.layout.columns),
            compared=compared,
            values=xxhash.xxh3_128_digest(self.values),
            value_paths=_digest(self.flat.nodes),
            values_nbytes=8 + len(self.values),
            own_paths=_digest(own),
            own_nbytes=len(pack_values(own)) if own else 0,
        )
        return msgspec.msgpack.encode(described)

    def answer(self, questions: Questions, number: int, rank: int) -> bytes:
        """`Details`, encoded, of rank `number` of the group, which is `rank` of the job."""
        body = self.layout.body if number in questions.bodies else b""
        compared = self.compared(None) if questions.compare else {}
        if questions.compare or questions.bodies:
            compared |= self._compared_parts(rank)
        values = self.values if number in questions.values else b""
        columns = self.layout.columns if questions.bodies else b""
        details = Details(body, columns, tuple(sorted(self.flat.own_nodes)), compared, values)
        return msgspec.msgpack.encode(details)

    def compared(self, turn: int | None) -> dict[str, bytes]:
        """Digests of tensors that other ranks may hold too, though nobody declared them replicated."""
        digests = {}
        for number, (name, tensor) in enumerate(self.flat.tensors.items()):
            spec = tensor.layout.spec
            mine = isinstance(spec, Whole) and spec.replicas == "compare"
            if mine and turn in (None, number % NUM_TURNS):
                digests[name] = digest_of(tensor.memory[0])
        return digests

    def _compared_parts(self, rank: int) -> dict[str, bytes]:
        """Digests of the local parts of DTensors whose mesh is not the whole job: another mesh may hold other elements
        under the same name, as pipeline stages do that name their layers alike."""
        digests = {}
        pieces = LocalPieces(rank)
        for name, tensor in self.flat.tensors.items():
            spec = tensor.layout.spec
            if isinstance(spec, Placed) and len(spec.mesh.ranks) < self.world_size:
                for box, view in pieces.of(tensor.layout, tensor.memory):
                    digests[f"{name}[{_extents(box)}]"] = digest_of(view)
        return digests


def _extents(box: Box) -> str:
    return ",".join(f"{start}:{stop}" for start, stop in zip(box.start, box.stop, strict=True))


def _digest(names: Mapping[str, object]) -> bytes:
    return xxhash.xxh3_128_digest("\n".join(sorted(names)).encode("utf-8", "surrogatepass"))
