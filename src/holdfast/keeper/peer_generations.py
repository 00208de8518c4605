"""The generations of checkpoints of which a keeper holds copies or parity for other nodes.

A node may have no part of such a checkpoint of its own, and then a peer sends it the generation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from threading import Lock
from typing import Final

import numpy as np

from holdfast.errors import HoldfastError
from holdfast.format.records import Place
from holdfast.keeper.persist import Sealing
from holdfast.node_memory.generations import decode_generation, protected_ids, read_generation, write_generation
from holdfast.node_memory.node_folder import NodeFolder, unusable_memory
from holdfast.peers.peer_messages import Damaged, Declined, Noted, PeerReply, PutGeneration
from holdfast.store.base import Bytes

#: Limit for the bytes of a generation that a peer sends.
MAX_GENERATION_NBYTES: Final = 1 << 30


class PeerGenerations:
    """The generations in `folder`. ``known_sealing`` gives the sealing of a checkpoint if the keeper has it. Safe for
    several threads."""

    def __init__(self, folder: NodeFolder, known_sealing: Callable[[str], Sealing | None]) -> None:
        self._folder = folder
        self._known_sealing = known_sealing
        self._lock = Lock()
        self._sealings: dict[str, Sealing] = {}
        #: The checkpoints of which peers have offered something, so that they may send the generation.
        self._expected: set[str] = set()

    def sealing(self, checkpoint_id: str) -> Sealing | None:
        """The sealing of a checkpoint; None where its generation is not here, or is damaged."""
        known = self._known_sealing(checkpoint_id) or self._sealings.get(checkpoint_id)
        if known is None:
            with suppress(FileNotFoundError, HoldfastError):
                known = Sealing(read_generation(self._folder, checkpoint_id))
                with self._lock:
                    self._sealings[checkpoint_id] = known
        return known

    def newest_protected(self) -> Place | None:
        """The place of the newest protected checkpoint that this node knows."""
        sealings = [self.sealing(each) for each in protected_ids(self._folder)]
        return max((each.generation.place for each in sealings if each is not None), default=None)

    def expect(self, checkpoint_id: str) -> None:
        """Have the generation of a checkpoint taken from a peer."""
        with self._lock:
            self._expected.add(checkpoint_id)

    def sink(self, put: PutGeneration) -> GenerationSink:
        """The memory for a generation that a peer sends."""
        if put.nbytes > MAX_GENERATION_NBYTES:
            raise ValueError(f"a generation of {put.nbytes} bytes is too large")
        return GenerationSink(self, put)

    def learn(self, put: PutGeneration, data: bytes) -> PeerReply:
        """Take the generation of a checkpoint from a peer."""
        try:
            generation = decode_generation(data, path=put.checkpoint_id, tier="peer memory")
            sealing = Sealing(generation)
        except HoldfastError as error:
            return Damaged(error.message)
        if generation.checkpoint_id != put.checkpoint_id:
            return Damaged("it is another checkpoint's generation")
        with self._lock:
            if put.checkpoint_id not in self._expected:
                return Declined("nothing of that checkpoint is being received")
            with unusable_memory(self._folder.path):
                write_generation(self._folder, generation)
            self._sealings[put.checkpoint_id] = sealing
        return Noted()

    def forget(self, held: Collection[str]) -> None:
        """Forget the manifests of all checkpoints but those in `held`."""
        with self._lock:
            self._expected.intersection_update(held)
            for checkpoint_id in self._sealings.keys() - set(held):
                del self._sealings[checkpoint_id]


class GenerationSink:
    """A `PutSink` for the generation of a checkpoint."""

    def __init__(self, generations: PeerGenerations, put: PutGeneration) -> None:
        self.memory: Bytes = np.empty(put.nbytes, np.uint8)
        self._generations = generations
        self._put = put

    def received(self, nbytes: int) -> None:
        """Do nothing: `finish` decodes all bytes at once."""

    def finish(self) -> PeerReply:
        """All bytes have arrived."""
        return self._generations.learn(self._put, self.memory.tobytes())

    def abort(self) -> None:
        """Do nothing: nobody has seen it."""
