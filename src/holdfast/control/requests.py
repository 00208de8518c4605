"""Requests of the job's store that nobody waits for longer than agreed.

torch's stores give no deadline to most requests, and where the process that serves a store is stopped or its node is
lost, even a ``wait`` with a time limit hangs (seen with torch 2.13: after the limit it tells the server that it waits
no longer, and waits for the answer to that). So a thread of its own makes the requests of a connection, and whoever
asked stops waiting when the time is up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar
from weakref import finalize

from holdfast.errors import StorageError
from holdfast.store.helpers import Helpers

#: How often whoever waits for an answer looks after other things.
_LOOK_S: Final = 0.1

T = TypeVar("T")


class Requests:
    """The requests of one connection, one after the other. For one thread at a time."""

    def __init__(self) -> None:
        helpers = self._helpers = Helpers()
        self._is_done: Callable[[], bool] = lambda: True
        # Its threads know `helpers`, not this object.
        finalize(self, helpers.close)

    @property
    def is_busy(self) -> bool:
        """Whether a request is under way that its caller did not wait for to the end."""
        return not self._is_done()

    def ask(self, call: Callable[[], T], timeout_s: float, *, meanwhile: Callable[[], None] | None = None) -> T:
        """Return or raise what `call` returns or raises, which makes requests of the store; call `meanwhile` now and
        then while it does.

        Raises:
            StorageError: code ``storage.control``: the store did not answer within `timeout_s`. From then on the
                connection `is_busy`, until it does answer.
        """
        assert not self.is_busy
        request = self._helpers.start(call)
        self._is_done = request.done
        end_s = time.monotonic() + timeout_s
        while True:
            left_s = end_s - time.monotonic()
            try:
                return request.result(max(min(left_s, _LOOK_S), 0.0))
            except TimeoutError:
                if request.done():  # meanwhile, or with an error of this kind
                    return request.result()
            if left_s <= 0:
                raise lost(f"it did not answer within {timeout_s:.3g} s")
            if meanwhile is not None:
                meanwhile()


def lost(why: object) -> StorageError:
    """The error for a store that does not answer."""
    return StorageError(
        f"the store of the process group does not answer: {why}.",
        code="storage.control",
        action="Restart the job: the process that serves the store, usually on the node of rank 0, is gone or stopped.",
    )
