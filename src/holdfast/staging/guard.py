"""The guard: nothing steps while what it would change is being copied."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class Guard:
    """Holds back steps of hooked optimizers, and whoever else asks, as long as anything is `held`.

    Safe for several threads. Nothing is held for ever: who holds lets go when it fails, too.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_held = 0
        self._hooks: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()
        #: Seconds that steps, and others, have waited altogether.
        self.waited_s = 0.0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep everybody waiting for the time of a ``with`` block."""
        self.hold()
        try:
            yield
        finally:
            self.let_go()

    def hold(self) -> None:
        """Keep everybody waiting until `let_go`, which may be called by another thread."""
        with self._changed:
            self._num_held += 1

    def let_go(self) -> None:
        """End one `hold`."""
        with self._changed:
            self._num_held -= 1
            self._changed.notify_all()

    def wait(self) -> None:
        """Return when nothing is held: at once, mostly."""
        if not self._num_held:
            return
        start_s = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: not self._num_held)
            self.waited_s += time.perf_counter() - start_s

    def hook(self, optimizers: Iterable[Optimizer]) -> None:
        """Have steps of `optimizers` wait, those that do not yet."""
        for optimizer in optimizers:
            if optimizer not in self._hooks:
                self._hooks[optimizer] = optimizer.register_step_pre_hook(lambda *_: self.wait())

    def unhook(self) -> None:
        """Have no steps wait any more."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
