"""The modes of new folders and files: for their owner alone, unless the user asks for something else.

A run has one mode, that of its folder: whatever is created in it gets that mode, so a run whose folder a group can read
stays readable for the group, whichever job goes on with it. The umask applies on top, as to every new file.
"""

from __future__ import annotations

import os
from typing import Final

from holdfast.errors import ConfigurationError

#: The environment variable with the mode of new folders of runs, in octal digits.
VARIABLE: Final = "HOLDFAST_FOLDER_MODE"
PRIVATE: Final = 0o700


def new_folder_mode() -> int:
    """The mode of a new folder of a run. Raises `ConfigurationError`, code ``config.folder_mode``, where the
    environment has no mode under that name."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return PRIVATE
    mode = int(text, 8) if text.isdecimal() and set(text) <= set("01234567") else -1
    if mode & ~0o777 or mode & PRIVATE != PRIVATE:
        raise ConfigurationError(
            f"{VARIABLE}={text!r:.40} is no mode of a folder that its owner can use.",
            code="config.folder_mode",
            action="Give three octal digits: 700 for this user alone, 750 to let the group read, 770 to let it write.",
        )
    return mode


def in_folder(folder_mode: int) -> tuple[int, int]:
    """The modes of the folders and of the files in a folder with this mode."""
    return (folder_mode & 0o777) | 0o700, (folder_mode & 0o666) | 0o600
