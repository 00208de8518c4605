"""Requests to the job's store, each with a time limit for the caller.

Most requests of torch's stores take no deadline. Where the process that serves a store is stopped or its node is lost,
even a ``wait`` with a time limit hangs (seen with torch 2.13: after the limit, the client tells the server that it
stops waiting, and then waits for the answer to that). So a separate thread makes the requests of a connection, and the
caller stops waiting for that thread when its time is up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar
from weakref import finalize

from holdfast.errors import StorageError
from holdfast.store.helpers import Helpers

#: Interval at which a waiting caller runs `meanwhile`.
_LOOK_S: Final = 0.1

T = TypeVar("T")


class Requests:
    """Runs the requests of one connection, one after the other. Only one thread at a time may use it."""

    def __init__(self) -> None:
        helpers = self._helpers = Helpers()
        self._is_done: Callable[[], bool] = lambda: True
        # The helper threads refer to `helpers`, not to this object, so that this object can be collected.
        finalize(self, helpers.close)

    @property
    def is_busy(self) -> bool:
        """Whether a request is still running after its caller stopped waiting for it."""
        return not self._is_done()

    def ask(self, call: Callable[[], T], timeout_s: float, *, meanwhile: Callable[[], None] | None = None) -> T:
        """Run `call`, which makes requests to the store, and return its result or raise its error. Blocks up to
        `timeout_s`, and calls `meanwhile` now and then until `call` ends.

        Raises:
            StorageError: code ``storage.control``: the store did not answer within `timeout_s`. From then on the
                connection `is_busy`, until the store does answer.
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
                if request.done():  # it ended just now, or `call` itself raised a TimeoutError
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
