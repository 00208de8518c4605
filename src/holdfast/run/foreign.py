"""Files and folders of other programs that users mistake for runs."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import NamedTuple

from holdfast.format.records import MARKER_KEY, SEAL_NAME

#: The advice where `load` and `open` read what no run is: they look for it before they give up.
_READABLE = (
    "It is not a run, but holdfast.load and holdfast.open read its safetensors files, and holdfast import makes a run "
    "of them."
)
_READ_WHOLE = "It is not a run, but holdfast.load and holdfast.open read it, and holdfast import makes a run of it."
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pt.tar", ".pth.tar")


class Foreign(NamedTuple):
    """The kind of a foreign file or folder, as text that follows "it is", and the next action for the user."""

    what: str
    action: str


def file_kind(path: PurePath) -> Foreign:
    """The kind of the file `path`, judged by its name."""
    from holdfast.format import manifest as fmt  # imports numpy, which a command needs only if it finds no run

    if path.name == MARKER_KEY:
        return Foreign("the marker of a run", f"Name the folder: {path.parent}.")
    if path.name in (fmt.NAME, SEAL_NAME) or fmt.is_file_name(path.name):
        return Foreign("one file of a checkpoint", f"Name its folder: {path.parent}.")
    if path.suffix == ".safetensors":
        return Foreign("a safetensors file", _READABLE)
    if path.name.endswith(_TORCH_SUFFIXES):
        return Foreign("a file, such as torch.save writes", _READ_WHOLE)
    if path.name in ("config.json", "model.safetensors.index.json", ".metadata"):
        return Foreign("one file of a checkpoint of another system", f"Name its folder: {path.parent}.")
    suffixes = ", ".join((".safetensors", *_TORCH_SUFFIXES))
    return Foreign("a file", f"Name the folder of a run; of other files, those are read that end with {suffixes}.")


def near_file(path: PurePath, names: Collection[str]) -> str | None:
    """The file of weights that the user may have meant by `path`, among the `names` beside it; None where no name is
    near."""
    readable = [name for name in names if PurePath(name).suffix in (".safetensors", *_TORCH_SUFFIXES)]
    return next(iter(get_close_matches(path.name, readable, n=1, cutoff=0.75)), None)


def folder_kind(names: Collection[str]) -> Foreign | None:
    """The kind of a folder that holds `names`; None where it is not known."""

    def holds(*patterns: str) -> bool:
        return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)

    if "adapter_config.json" in names:
        return Foreign("a folder of PEFT adapters", _READABLE)
    if "config.json" in names and holds("*.safetensors", "pytorch_model*.bin", "*.safetensors.index.json"):
        return Foreign("a Hugging Face model folder", _READABLE)
    if ".metadata" in names:
        return Foreign(
            "a checkpoint of torch.distributed.checkpoint",
            _READ_WHOLE,
        )
    if "latest" in names and holds("global_step*"):
        return Foreign("a DeepSpeed checkpoint folder", _READ_WHOLE)
    return None
