"""Folders of Hugging Face: tensors in safetensors files, one or several, with an index where there are several."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

import numpy as np
import xxhash

from holdfast.format.names import component, shown
from holdfast.format.values import Node
from holdfast.geometry import Int64s
from holdfast.interop.foreign_format import ForeignFolder, ForeignState, damaged
from holdfast.interop.given_places import ForeignTensor, GivenPlaces
from holdfast.interop.safetensors_header import Header, HeaderTensor, read_header
from holdfast.interop.weight_files import INDEX_SUFFIX, check_index, find_weight_files

_SUFFIX: Final = ".safetensors"
#: The name of transformers, which comes first where a folder has several.
_FIRST: Final = "model.safetensors"


class HuggingFaceFormat:
    """Folders with safetensors files, as `save_pretrained` writes them; also a single such file."""

    kind: Final = "a Hugging Face folder"

    def recognises(self, names: Collection[str]) -> bool:
        """As `ForeignFormat.recognises`."""
        return any(name.endswith((_SUFFIX, _SUFFIX + INDEX_SUFFIX)) for name in names)

    def open(self, folder: ForeignFolder) -> ForeignState:
        """As `ForeignFormat.open`. Reads the headers of all files."""
        names = [name for name in folder.names if name.endswith(_SUFFIX)]
        files, index = find_weight_files(folder, names, first=_FIRST)
        headers = {file: read_header(folder.storage, file) for file in files}
        if index is not None:
            check_index(folder, index, {(each.name, file) for file in files for each in headers[file].tensors})
        return state_of_headers(folder, headers)


def state_of_headers(
    folder: ForeignFolder,
    headers: Mapping[str, Header],
    *,
    kind: str = HuggingFaceFormat.kind,
    name_of: Callable[[str], str] = component,
    nodes: Mapping[str, Node] | None = None,
) -> ForeignState:
    """The state in the safetensors files that have `headers`. `name_of` makes the name of a tensor from its key."""
    homes: dict[str, tuple[int, HeaderTensor]] = {}
    for number, (file, header) in enumerate(headers.items()):
        for tensor in header.tensors:
            name = name_of(tensor.name)
            if name in homes:
                what = f"holds tensor {shown(tensor.name)} a second time"
                raise damaged(folder.path(file), what, tensor=tensor.name)
            homes[name] = number, tensor
    names = sorted(homes)
    tensors = [_whole(name, *homes[name]) for name in names]
    offsets = np.asarray([homes[name][1].offset for name in names], np.int64)

    def offsets_of(_: int, numbers: Int64s) -> Int64s:
        found: Int64s = offsets[numbers]
        return found

    places = GivenPlaces(tensors, [header.nbytes for header in headers.values()], offsets_of)
    digest = xxhash.xxh3_128()
    for file, header in headers.items():
        digest.update(f"{file}\0{header.nbytes}\0".encode(errors="surrogateescape"))
        digest.update(header.text)
    digest.update("\0".join(names).encode(errors="surrogateescape"))  # peft's depend on another file
    return ForeignState(folder, places, list(headers), kind=kind, identity=digest.hexdigest(), nodes=nodes)


def _whole(name: str, file: int, tensor: HeaderTensor) -> ForeignTensor:
    """A tensor that is one part."""
    sizes = np.asarray([tensor.shape], np.int64)
    return ForeignTensor(name, tensor.dtype, tensor.shape, np.zeros_like(sizes), sizes, np.asarray([file], np.int64))
