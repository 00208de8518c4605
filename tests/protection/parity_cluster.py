"""Nodes of one parity group in one process: their files, what they send, and what survives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from holdfast.protection.chains import Hop, LostRange, RebuildChain, rebuild_chains
from holdfast.protection.erasure import STRIP_NBYTES, add_multiple
from holdfast.protection.stripes import FileRange, LineFile, NodeLine, PlacedRange, Striping
from holdfast.store.base import Bytes

HEADER_NBYTES = 4096


class ParityCluster:
    """Nodes with random files of the given sizes, `files` by number, and the parity that they hold."""

    def __init__(self, sizes: Mapping[str, Iterable[int]], losses: int, *, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.files: dict[int, Bytes] = {}
        lines = []
        for node, each in sizes.items():
            numbers = []
            for nbytes in each:
                number = len(self.files)
                self.files[number] = rng.integers(0, 256, nbytes, dtype=np.uint8)
                numbers.append(LineFile(number, min(HEADER_NBYTES, nbytes), nbytes))
            lines.append(NodeLine(node, tuple(numbers)))
        self.striping = Striping(tuple(lines), losses)
        self.nodes = list(sizes)
        self.parity = self._encoded(rng)

    def _encoded(self, rng: np.random.Generator) -> dict[tuple[int, int], Bytes]:
        """The rows of parity by stripe and row, when the shares of all nodes have arrived in any order."""
        striping = self.striping
        found = {
            (stripe, row): np.zeros(striping.row_nbytes(stripe, row), np.uint8)
            for stripe in range(len(self.nodes))
            for row in striping.parity_rows
        }
        shares = [share for node in self.nodes for share in striping.shares(node)]
        for number in rng.permutation(len(shares)):
            share = shares[number]
            data = self._joined(share.parts, share.nbytes)
            parity = found[share.stripe, share.parity_row]
            for begin in range(0, share.nbytes, STRIP_NBYTES):
                end = begin + STRIP_NBYTES
                add_multiple(parity[begin:end], data[begin:end], share.factor)
        return found

    def _joined(self, parts: Iterable[PlacedRange], nbytes: int) -> Bytes:
        found, filled = np.empty(nbytes, np.uint8), 0
        for offset, (file, start, length) in parts:
            assert offset == filled
            found[offset : offset + length] = self.files[file][start : start + length]
            filled += length
        assert filled == nbytes
        return found

    def own(self, chain: RebuildChain, hop: Hop) -> Bytes:
        """The bytes that a node of a chain adds, before the product."""
        if hop.row >= self.striping.num_data:
            return self.parity[chain.stripe, hop.row][chain.start : chain.start + hop.nbytes]
        return self._joined(hop.parts, hop.nbytes)

    def along(self, chain: RebuildChain, *, piece_nbytes: int = STRIP_NBYTES) -> Bytes:
        """The sum of a chain, made piece by piece. Each node sends the bytes that its hop says, and no others."""
        found = np.zeros(chain.nbytes, np.uint8)
        for begin in range(0, chain.nbytes, piece_nbytes):
            end = min(begin + piece_nbytes, chain.nbytes)
            received = np.zeros(0, np.uint8)
            for hop in chain.hops:
                total = np.zeros(end - begin, np.uint8)
                total[: received.size] = received
                add_multiple(total, self.own(chain, hop)[begin:end], hop.factor)
                received = total[: max(0, hop.sum_nbytes - begin)]
            found[begin : begin + received.size] = received
        return found

    def directly(self, chain: RebuildChain) -> Bytes:
        """The same sum, made by one node in one go."""
        found = np.zeros(chain.nbytes, np.uint8)
        for hop in chain.hops:
            add_multiple(found, self.own(chain, hop), hop.factor)
        return found

    def rebuilt(self, lost: Iterable[str], wanted: Iterable[LostRange]) -> dict[FileRange, Bytes]:
        """The rebuilt bytes that the receivers get, by file and range."""
        found = {}
        for chain in rebuild_chains(self.striping, list(lost), wanted):
            row = self.along(chain)
            for offset, data in chain.parts:
                assert data not in found
                found[data] = row[offset : offset + data.nbytes]
        return found
