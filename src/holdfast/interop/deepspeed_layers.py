"""The layers of experts (``deepspeed.moe``) in folders of DeepSpeed: the files of the experts, and who holds which.

Each rank numbers its own experts of a layer from 0, in its optimizer file and in the model file, which is of rank 0.
The file of an expert has its number among those of all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from holdfast.errors import HoldfastError
from holdfast.format.names import shown
from holdfast.interop.deepspeed_archives import Archives
from holdfast.interop.deepspeed_folder import FoundFiles, expert_name, missing_experts
from holdfast.interop.deepspeed_states import ModelStates, expert_states
from holdfast.interop.foreign_format import damaged, unreadable
from holdfast.interop.torch_globals import PickledTensor

_OF_EXPERT: Final = re.compile(
    r"\.?(?P<layer>(?:.+\.)?deepspeed_moe\.experts\.deepspeed_experts\.)(?P<number>[0-9]{1,9})(?P<rest>\..+)", re.DOTALL
)
#: The order of the ranks: those with the same experts lie beside each other.
_BY_DATA: Final = "use_data_before_expert_parallelism"


class ExpertFile(NamedTuple):
    """The file of one expert, with its tensors and values by their names in the whole model."""

    key: str
    content: Mapping[str, object]


class ExpertLayers(NamedTuple):
    """All layers of experts of a model: the number of experts of each, by the first part of their parameters' names,
    and their files."""

    counts: Mapping[str, int]
    files: Sequence[ExpertFile]

    @property
    def keys(self) -> list[str]:
        """The keys of the files."""
        return [file.key for file in self.files]

    @property
    def copies(self) -> dict[str, tuple[str, PickledTensor]]:
        """Each tensor of an expert by its name, with the key of its file."""
        return {
            name: (file.key, each)
            for file in self.files
            for name, each in file.content.items()
            if isinstance(each, PickledTensor)
        }

    def name_at(self, name: str, place: int, size: int) -> str | None:
        """The name in the whole model of a parameter that rank `place` of `size` expert-parallel ranks calls `name`;
        None if there is no such expert."""
        found = _OF_EXPERT.fullmatch(name)
        if found is None:
            return name
        total = self.counts.get(found["layer"], 0)
        number = place * (total // size) + int(found["number"])
        is_held = total % size == 0 and int(found["number"]) < total // size
        return f"{found['layer']}{number}{found['rest']}" if is_held else None

    def local_name(self, name: str, size: int) -> str:
        """The name that the expert-parallel rank which holds a parameter, one of `size`, has for it."""
        found = _OF_EXPERT.fullmatch(name)
        if found is None:
            return name
        held = self.counts[found["layer"]] // size
        return f"{found['layer']}{int(found['number']) % held}{found['rest']}"


def is_of_expert(name: str) -> bool:
    """Whether this is the name of a parameter of an expert."""
    return _OF_EXPERT.fullmatch(name) is not None


def read_layers(found: FoundFiles, model: ModelStates, archives: Archives) -> ExpertLayers:
    """The files of all experts. Refuses a folder that lacks some, or has some in another form."""
    counts = model.engine.get("num_experts")
    if model.engine.get("ds_autoep_layers") is not None:
        what = "has layers of experts that DeepSpeed made of those of another library (AutoEP)"
        raise unreadable(found.root, what, action="Load it with DeepSpeed, and save its universal folder.")
    if not isinstance(counts, list) or not all(type(each) is int and each > 0 for each in counts):
        raise damaged(found.root, "has files of experts, and a model file that does not say how many there are")
    if faults := missing_experts(found, counts):
        raise faults
    totals: dict[str, int] = {}
    files = []
    for layer, total in enumerate(counts):
        heads = set()
        for number in range(total):
            key = found.experts[layer, number]
            content = {name.removeprefix("."): each for name, each in archives.read(key, expert_states).items()}
            parts = [_OF_EXPERT.fullmatch(name) for name in content]
            if any(part is None or int(part["number"]) != number for part in parts):
                what = f"holds other tensors than those of expert {number}: it was renamed, or is of another save"
                raise damaged(f"{found.root}/{expert_name(layer, number)}", what)
            heads |= {part["layer"] for part in parts if part is not None}
            files.append(ExpertFile(key, content))
        if len(heads) > 1 or heads & totals.keys():
            raise damaged(found.root, f"has files of layer {layer} that are of different layers")
        totals |= dict.fromkeys(heads, total)
    return ExpertLayers(totals, files)


def holders(world_size: int, parts: int, *, by_data: bool) -> list[Sequence[int]]:
    """For each expert-parallel rank, the ranks that hold its experts, each a part of their optimizer's state, in the
    order of the parts. With `by_data` they lie beside each other."""
    size = world_size // parts
    if by_data:
        return [range(place * parts, (place + 1) * parts) for place in range(size)]
    return [range(place, world_size, size) for place in range(size)]


def possible_orders(model: ModelStates) -> Sequence[bool]:
    """The values that `holders` may have as `by_data`: both where the folder lacks the configuration of the engine."""
    config = model.engine.get("ds_config")
    if not isinstance(config, dict):
        return False, True
    return [config.get(_BY_DATA, False) is True]


def other_experts(path: str, name: str) -> HoldfastError:
    """The error for an optimizer file whose master weights are not those of the experts of its rank."""
    what = f"holds other weights for {shown(name):.200} than the file of that expert"
    return damaged(path, what + ": it was renamed, or is of another save")
