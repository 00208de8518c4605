"""What ends a benchmark before its time, or its command with status 1."""


class BenchError(Exception):
    """A run that cannot start or cannot count, or a missed bar: the message says which, and what to do."""
