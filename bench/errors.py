"""The errors of the benchmarks."""

from __future__ import annotations


class BenchError(Exception):
    """Root of all errors of the benchmarks. Each ends the command with a message and a non-zero status."""


class SetupError(BenchError):
    """The run cannot start as asked."""


class RankFailedError(BenchError):
    """A rank process raised or died."""


class WrongBytesError(BenchError):
    """A contender loaded bytes that differ from those that it saved."""


class RawLimitError(BenchError):
    """A contender beat the raw limit, so the raw loop did not reach the limit."""


class MarkersError(BenchError):
    """The file has no place for the table."""
