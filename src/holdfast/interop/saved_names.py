"""The name under which ``torch.save`` wrote a file: the entries of the archive begin with it.

Files of ranks often have equal sizes and say nothing of their rank. So this name alone tells that one was renamed, or
copied over another one. Archives that were written by way of an open file have none.
"""

from __future__ import annotations

from holdfast.interop.foreign_format import ForeignFolder, damaged
from holdfast.interop.torch_archive import TorchArchive


def check_saved_name(folder: ForeignFolder, key: str, archive: TorchArchive) -> None:
    """Refuse the file `key` if it was saved under the name of another file that is in the same folder.

    A file whose first name is not there may have been renamed with a reason, as by tools for older versions.
    """
    above, _, name = key.rpartition("/")
    stem, dot, suffix = name.rpartition(".")
    if archive.saved_as == stem:
        return
    first = f"{archive.saved_as}{dot}{suffix}"
    if first in (folder.storage.list(above) if above else folder.names):
        what = f"was saved as {first}, which is there, too: it was renamed, or copied over this file"
        raise damaged(folder.path(key), what, action="Copy both files again from where they were saved.")
