"""The places where the interpreter can raise an interrupt."""

from __future__ import annotations

import linecache
import opcode
from types import FrameType


def leaves_block(frame: FrameType) -> bool:
    """Whether the interpreter is about to release a lock or close a file at the end of a ``with`` block. It looks for
    interrupts where functions begin, after calls, and where loops go back: never between such a block and the release,
    which is C. A trace function that raises there would keep the lock for ever."""
    is_leaving = opcode.opname[frame.f_code.co_code[frame.f_lasti]] in ("LOAD_CONST", "SWAP")
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return is_leaving and ("_lock:" in line or "with os.fdopen(" in line)
