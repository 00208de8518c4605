"""A keeper's part in rebuilding what was lost with a node, from parity and from the slots of the nodes that are left.

Whoever wants bytes of a lost slot asks the last node of a chain (`protection.chains`) for its sum. That node asks the
one before it, adds its own product, and answers. No node remembers anything of it. Several pieces are asked for at the
same time, so that all nodes of a chain work at once; each holds one piece for each connection.

The result is received into a copy, and verified like any copy. Where it proves wrong, or a node does not answer, all
nodes of the group hash what they have again: so the one that rebuilds learns which of them it must do without.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import numpy as np

from holdfast.errors import HoldfastError
from holdfast.keeper.copies import CopyFilling, PeerCopies
from holdfast.keeper.own_slots import OwnSlots, file_numbers
from holdfast.keeper.parity_rows import ParityRows
from holdfast.keeper.peer_generations import PeerGenerations
from holdfast.keeper.peer_ways import PeerConnections, Way, require
from holdfast.peers.peer_messages import (
    CheckHeld,
    CopyKept,
    Damaged,
    Declined,
    GetSum,
    NodesFailed,
    Noted,
    PeerReply,
    RebuildCopy,
    Sent,
    SumHop,
    SumPart,
)
from holdfast.protection.chains import Hop, LostRange, RebuildChain, rebuild_chains
from holdfast.protection.erasure import STRIP_NBYTES, add_multiple
from holdfast.protection.stripes import FileRange, Striping
from holdfast.store.base import Bytes

#: Bytes of a chain that one request asks for, and number of requests at the same time. A piece is on one link after the
#: other, so a chain needs many small ones to keep its links busy.
PIECE_NBYTES: Final = 2 * STRIP_NBYTES
_NUM_PIECES: Final = 12
#: Limits for a sum to arrive; and for a node to hash again what it has, beside the time per byte.
_SUM_S: Final = 15.0
_CHECK_S: Final = 10.0
_CHECK_S_PER_NBYTES: Final = 4 / (1 << 30)
#: The name of a receiver that is no node of the group.
_OUTSIDE: Final = ""

_log = logging.getLogger(__name__)


class _SumPiece(NamedTuple):
    """The bytes from `begin` to `end` of a chain."""

    chain: RebuildChain
    begin: int
    end: int


class ChainSums:
    """The terms that a keeper adds to the sums of chains, from its `own` slots and its `rows` of parity. Safe for
    several threads. ``way_to`` gives the way to an address, None while this keeper knows no secret."""

    def __init__(
        self,
        own: OwnSlots,
        rows: ParityRows,
        generations: PeerGenerations,
        way_to: Callable[[str], Way | None],
    ) -> None:
        self._own = own
        self._rows = rows
        self._generations = generations
        self._way_to = way_to
        self._connections = PeerConnections()

    def close(self) -> None:
        """Close the connections to other nodes."""
        self._connections.close()

    def sum(self, get: GetSum) -> Bytes:
        """The sum that `get` asks for. Raises `StorageError` where a node of the chain does not answer, or lacks its
        part, and `ValueError` for a chain that no keeper makes."""
        *before, hop = get.hops
        upstream_nbytes = before[-1].sum_nbytes if before else 0
        if not max(hop.nbytes, upstream_nbytes) <= hop.sum_nbytes == get.nbytes <= PIECE_NBYTES:
            raise ValueError("the sizes of a chain do not fit")
        total = np.zeros(get.nbytes, np.uint8)
        if upstream_nbytes:
            self.fetch(GetSum(get.checkpoint_id, upstream_nbytes, tuple(before)), total[:upstream_nbytes])
        add_multiple(total, self._own_bytes(get.checkpoint_id, hop), hop.factor)
        return total

    def fetch(self, get: GetSum, out: Bytes) -> None:
        """Fill `out` with the sum of the last node of a chain. Raises `StorageError` where that fails."""
        way = self.way(get.hops[-1].address)
        with self._connections.to(way, timeout_s=_SUM_S) as connection:
            require(connection.get(get, out, timeout_s=_SUM_S), Sent, way)

    def way(self, address: str) -> Way:
        """The way to `address`. Raises `ValueError` while this keeper knows no secret."""
        way = self._way_to(address)
        if way is None:
            raise ValueError("this keeper does not know the job")
        return way

    def check(self, check: CheckHeld) -> PeerReply:
        """Hash again what this node has of a checkpoint."""
        id_ = check.checkpoint_id
        sealing, slots = self._generations.sealing(id_), self._own.of(id_)
        held = set[int]().union(*map(file_numbers, slots))
        if sealing is None or not held >= set(check.files):
            return Damaged("this node has no longer what it had of the checkpoint")
        try:
            for slot in slots:
                sealing.check(slot)
                sealing.file_seals(slot)
            if self._rows.check(id_) < check.num_rows:
                return Damaged("this node has no longer the parity that it had")
        except HoldfastError as error:
            return Damaged(error.message)
        return Noted()

    def _own_bytes(self, checkpoint_id: str, hop: SumHop) -> Bytes:
        """The bytes that this node adds, before the product."""
        if not hop.nbytes:
            return np.empty(0, np.uint8)
        if not hop.parts:
            data = self._rows.view(checkpoint_id, hop.stripe, hop.row)[hop.start : hop.start + hop.nbytes]
        else:
            views = [self._own.view(checkpoint_id, *part) for part in map(_ranged, hop.parts)]
            data = views[0] if len(views) == 1 else np.concatenate(views)
        if data.size != hop.nbytes:
            raise ValueError("a hop of a chain has another size than its parts")
        return data


class Rebuilder:
    """Rebuilds lost slots into `copies` of this keeper, by `sums`."""

    def __init__(self, copies: PeerCopies, sums: ChainSums) -> None:
        self._copies = copies
        self._sums = sums

    def rebuild(self, request: RebuildCopy) -> PeerReply:
        """Rebuild a copy that was offered before. Blocks until it is whole, or cannot be. Raises `ValueError` for a
        request that no rank makes."""
        trouble = ""
        with self._copies.filling(request.token) as filling:
            checkpoint_id = filling.contents.checkpoint_id
            pieces = list(_pieces(request, filling))
            try:
                with ThreadPoolExecutor(_NUM_PIECES, thread_name_prefix="holdfast-rebuild") as pool:
                    parts = [pool.submit(self._fill, piece, request, filling) for piece in pieces]
                    try:
                        for part in parts:
                            part.result()
                    except BaseException:
                        pool.shutdown(wait=False, cancel_futures=True)
                        raise
            except HoldfastError as error:
                trouble = error.message
        reply = self._copies.drop(request.token) if trouble else self._copies.finish(request.token)
        if isinstance(reply, CopyKept):
            return reply
        trouble = trouble or (reply.reason if isinstance(reply, Damaged) else "")
        _log.error("a copy cannot be rebuilt: %s", trouble)
        return self._failed(request, checkpoint_id, trouble)

    def _fill(self, piece: _SumPiece, request: RebuildCopy, filling: CopyFilling) -> None:
        """Write a piece of a chain into the copy."""
        addresses = {node.identity: at for node, at in zip(request.group.nodes, request.addresses, strict=True)}
        hops = tuple(_hop(piece, hop, addresses[hop.node]) for hop in piece.chain.hops if hop.sum_nbytes > piece.begin)
        total = np.zeros(piece.end - piece.begin, np.uint8)
        if hops:
            get = GetSum(filling.contents.checkpoint_id, hops[-1].sum_nbytes, hops)
            if piece.chain.hops[-1].node == piece.chain.receiver:
                total[: get.nbytes] = self._sums.sum(get)
            else:
                self._sums.fetch(get, total[: get.nbytes])
        starts = {part.file: part.start for part in filling.contents.files}
        for offset, (file, start, nbytes) in piece.chain.parts:
            begin, end = max(offset, piece.begin), min(offset + nbytes, piece.end)
            if begin < end:
                at = starts[file] + start + begin - offset
                filling.data[at : at + end - begin] = total[begin - piece.begin : end - piece.begin]

    def _failed(self, request: RebuildCopy, checkpoint_id: str, trouble: str) -> NodesFailed | Declined:
        """The reply that names the nodes that do not answer, or have no longer what they had."""
        numbers = [number for number in range(len(request.group.nodes)) if number not in request.lost]
        with ThreadPoolExecutor(len(numbers), thread_name_prefix="holdfast-check") as pool:
            sound = list(pool.map(lambda number: self._is_sound(request, checkpoint_id, number), numbers))
        damaged, silent = (
            tuple(number for number, found in zip(numbers, sound, strict=True) if found is kind)
            for kind in (False, None)
        )
        return NodesFailed(damaged, silent, trouble) if damaged or silent else Declined(trouble)

    def _is_sound(self, request: RebuildCopy, checkpoint_id: str, number: int) -> bool | None:
        """Whether a node still has what it had; None where it does not answer."""
        node = request.group.nodes[number]
        check = CheckHeld(checkpoint_id, tuple(sorted(node.files)), request.group.losses)
        if number == request.own:
            return isinstance(self._sums.check(check), Noted)
        nbytes = request.group.striping.line(node.identity).nbytes
        way = self._sums.way(request.addresses[number])
        try:
            with way.connect(_CHECK_S) as connection:
                reply = connection.ask(check, timeout_s=_CHECK_S + 2 * nbytes * _CHECK_S_PER_NBYTES)
                return isinstance(reply, Noted)
        except HoldfastError as error:
            _log.warning("%s", error)
            return None


def _pieces(request: RebuildCopy, filling: CopyFilling) -> Iterator[_SumPiece]:
    """The pieces of the chains that fill a copy. Raises `ValueError` where the group cannot give it."""
    nodes, num_nodes = request.group.nodes, len(request.group.nodes)
    numbers = {*request.lost, *(() if request.own is None else (request.own,))}
    if len(request.addresses) != num_nodes or not numbers <= set(range(num_nodes)):
        raise ValueError("the nodes of a group do not fit")
    striping, lost = request.group.striping, {nodes[number].identity for number in request.lost}
    receiver = _OUTSIDE if request.own is None else nodes[request.own].identity
    wanted = list(_wanted(striping, filling, receiver))
    chains = [list(_pieces_of(chain)) for chain in rebuild_chains(striping, lost, wanted)]
    # Pieces of several chains are under way at the same time: so all links of the group carry some.
    yield from filter(None, itertools.chain.from_iterable(itertools.zip_longest(*chains)))


def _pieces_of(chain: RebuildChain) -> Iterator[_SumPiece]:
    for begin in range(0, chain.nbytes, PIECE_NBYTES):
        yield _SumPiece(chain, begin, min(begin + PIECE_NBYTES, chain.nbytes))


def _wanted(striping: Striping, filling: CopyFilling, receiver: str) -> Iterator[LostRange]:
    """The files of a copy, as ranges of the lost node that had them."""
    owners = {file.file: line for line in striping.lines for file in line.files}
    for part in filling.contents.files:
        line = owners.get(part.file)
        if line is None or (part.data_start, part.nbytes) not in [
            (file.data_start, file.nbytes) for file in line.files if file.file == part.file
        ]:
            raise ValueError(f"the group has no file {part.file} of that size")
        yield LostRange(line.node, FileRange(part.file, 0, part.nbytes), receiver)


def _hop(piece: _SumPiece, hop: Hop, address: str) -> SumHop:
    """A hop of a chain, for a piece of it."""

    def within(nbytes: int) -> int:
        return min(max(nbytes - piece.begin, 0), piece.end - piece.begin)

    parts = []
    for offset, (file, start, nbytes) in hop.parts:
        begin, end = max(offset, piece.begin), min(offset + nbytes, piece.begin + within(hop.nbytes))
        if begin < end:
            parts.append(SumPart(file, start + begin - offset, end - begin))
    place = (piece.chain.stripe, hop.row, piece.chain.start + piece.begin)
    return SumHop(address, hop.factor, within(hop.nbytes), within(hop.sum_nbytes), tuple(parts), *place)


def _ranged(part: SumPart) -> FileRange:
    return FileRange(part.file, part.start, part.nbytes)
