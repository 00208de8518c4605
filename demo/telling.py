"""The frame of every demo's story: an empty folder for it, its promises as a table, and the exit status."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import holdfast
from demo.processes import DemoError
from demo.promises import Promise
from demo.show import CONSOLE, say, table_of


class Told(NamedTuple):
    """A story that was told: its promises, and a sentence that names its pictures."""

    promises: Sequence[Promise]
    pictures: str


def tell_in(out: Path, tell: Callable[[], Told]) -> None:
    """Tell a story with the new folder `out`, which replaces that of an earlier demo. Exits with a message if the story
    cannot be told to its end, or a promise was not kept."""
    shutil.rmtree(out, ignore_errors=True)
    # As Ctrl-C does: on its way out, the demo ends what it has started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        out.mkdir()
        promises, pictures = tell()
    except KeyboardInterrupt:
        sys.exit("demo: interrupted")
    except (DemoError, holdfast.HoldfastError) as error:
        sys.exit(f"demo: {error}")
    CONSOLE.print(table_of(promises))
    broken = [promise.text for promise in promises if not promise.kept]
    if broken:
        sys.exit(f"demo: {len(broken)} of {len(promises)} promises were broken. The first: {broken[0]}")
    say(f"All {len(promises)} promises were kept. {pictures}")
