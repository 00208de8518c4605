"""The files of a DeepSpeed checkpoint: the folder of a tag, or the folder above it with ``latest``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

from holdfast.errors import HoldfastError
from holdfast.interop.foreign_format import ForeignFolder, damaged, unreadable
from holdfast.wording import count

LATEST: Final = "latest"
_UNIVERSAL: Final = "latest_universal"
_ATOMS: Final = "zero"
_OPTIMIZER: Final = "optimizer_state.pt"
_MAX_TAG_NBYTES: Final = 4096
_MODEL: Final = re.compile(r"(?:zero_pp_rank_(?P<rank>[0-9]+)_)?mp_rank_(?P<mp>[0-9]{2,})_model_states\.pt")
#: Old versions wrote no underscore before "optim_states".
_OPTIM: Final = re.compile(r"(?P<bf16>bf16_)?zero_pp_rank_(?P<rank>[0-9]+)_mp_rank_(?P<mp>[0-9]{2,})_?optim_states\.pt")
#: The weights of one expert of one layer; old versions had one file for that expert of all layers.
_EXPERT: Final = re.compile(
    r"layer_(?P<layer>[0-9]{1,9})_expert_(?P<number>[0-9]{1,9})_mp_rank_(?P<mp>[0-9]{2,})_model_states\.pt"
)
#: The optimizer of an engine with experts and without ZeRO, or with an old version of it.
_WITHOUT_ZERO: Final = re.compile(r"expp_rank_(?P<rank>[0-9]{1,9})_mp_rank_(?P<mp>[0-9]{2,})_optim_states\.pt")
_OTHER_PARALLEL: Final = re.compile(
    r"layer_[0-9]+-model_[0-9]+-model_states\.pt|expert_[0-9]+_mp_rank_[0-9]+_model_states\.pt"
)
_TO_UNIVERSAL: Final = "Load it with DeepSpeed on the layout that saved it, and save that state by holdfast."
_SHOWN: Final = 5


class RankFiles(NamedTuple):
    """The files of one checkpoint, by their keys in the folder: ``model[r]`` and ``optim[r]`` are those of rank ``r``.

    There is one model file, of all ranks, unless `is_partitioned` (ZeRO-3).
    """

    model: tuple[str, ...]
    optim: tuple[str, ...]
    is_partitioned: bool


class FoundFiles(NamedTuple):
    """The files that are there, by their ranks; a model file of all ranks has rank None. Those of `experts` by the
    numbers of the layer and of the expert. `whole_optimizers` are those of expert-parallel ranks without ZeRO. `root`
    is the path of their folder, for messages."""

    prefix: str
    root: str
    model: dict[int | None, str]
    optim: dict[int, str]
    experts: dict[tuple[int, int], str]
    whole_optimizers: dict[int, str]

    @property
    def num_experts(self) -> list[int]:
        """The number of experts of each layer whose files are there."""
        return [total for _, total in sorted(Counter(layer for layer, _ in self.experts).items())]

    @property
    def is_partitioned(self) -> bool:
        """Whether each rank has a model file, as under ZeRO-3."""
        return None not in self.model and bool(self.model)


def is_deepspeed(names: Collection[str]) -> bool:
    """Whether a folder with these names is that of a tag, or one with ``latest``."""
    return LATEST in names or any(_is_state(name) for name in names)


class UniversalFiles(NamedTuple):
    """The files of a universal folder, by their keys: those of the model, the optimizer's, and those of each parameter,
    by its name and the name of the file without ``.pt``. `root` is the path of the folder, for messages.

    There is a model file for each of `num_slices` model-parallel ranks, unless it `is_partitioned`: then there is one
    for each rank of ZeRO-3.
    """

    root: str
    model: tuple[str, ...]
    is_partitioned: bool
    optimizer: str
    atoms: dict[str, dict[str, str]]

    @property
    def num_slices(self) -> int:
        """The number of model-parallel ranks whose model files these are."""
        return 1 if self.is_partitioned else len(self.model)


def is_universal(names: Collection[str]) -> bool:
    """Whether a folder with these names is a universal one, or has ``latest_universal`` and is no other one."""
    if _ATOMS in names:
        return any(map(_MODEL.fullmatch, names))
    return _UNIVERSAL in names and not is_deepspeed(names)


def find_universal(folder: ForeignFolder) -> UniversalFiles:
    """The files of the universal folder itself, or of the one that ``latest_universal`` names."""
    prefix, names = "", folder.names
    if _ATOMS not in names:
        tag = _tag(folder, _UNIVERSAL)
        prefix, names = f"{tag}/", folder.names_in(tag)
        if _ATOMS not in names:
            raise damaged(folder.path(_UNIVERSAL), f"names {tag!r:.100}, where no universal folder is")
    root = folder.path(prefix.removesuffix("/")) if prefix else folder.location.url
    found = [match for match in map(_MODEL.fullmatch, names) if match is not None]
    whole = sorted(int(match["mp"]) for match in found if match["rank"] is None)
    parts = sorted(int(match["rank"]) for match in found if match["rank"] is not None and int(match["mp"]) == 0)
    numbers, stem = (whole, "mp_rank_{:02d}") if whole else (parts, "zero_pp_rank_{}_mp_rank_00")
    model = [f"{stem}_model_states.pt".format(number) for number in range(max(numbers, default=0) + 1)]
    above = f"{prefix}{_ATOMS}"
    inside = folder.names_in(above)
    missing = [name for name in model if name not in names]
    missing += [] if _OPTIMIZER in inside else [f"{_ATOMS}/{_OPTIMIZER}"]
    if missing:
        details = [f"{name} is missing" for name in missing[:_SHOWN]]
        raise damaged(root, f"lacks {count(len(missing), 'file')}", action="Copy the folder again.", details=details)
    atoms = {}
    for name in inside:
        if name != _OPTIMIZER:
            files = [file for file in folder.names_in(f"{above}/{name}") if file.endswith(".pt")]
            atoms[name] = {file.removesuffix(".pt"): f"{above}/{name}/{file}" for file in files}
    keys = tuple(f"{prefix}{name}" for name in model)
    return UniversalFiles(root, keys, not whole, f"{above}/{_OPTIMIZER}", atoms)


def find_files(folder: ForeignFolder) -> FoundFiles:
    """The files of the checkpoint that a folder holds, or that its ``latest`` names."""
    prefix, names = "", folder.names
    if not any(map(_is_state, names)):
        tag = _tag(folder)
        prefix, names = f"{tag}/", folder.names_in(tag)
        if not any(map(_is_state, names)):
            raise _no_such_tag(folder, tag)
    root = folder.path(prefix.removesuffix("/")) if prefix else folder.location.url
    _check_parallel(root, names)
    model: dict[int | None, str] = {}
    optim: dict[int, str] = {}
    experts: dict[tuple[int, int], str] = {}
    whole_optimizers: dict[int, str] = {}
    for name in names:
        if (found := _MODEL.fullmatch(name)) is not None:
            model[None if found["rank"] is None else int(found["rank"])] = prefix + name
        elif (found := _OPTIM.fullmatch(name)) is not None:
            if (other := optim.get(int(found["rank"]))) is not None:
                what = f"has two files of rank {found['rank']}: {other.removeprefix(prefix)} and {name}"
                raise damaged(root, what, action="Remove those of another save.")
            optim[int(found["rank"])] = prefix + name
        elif (found := _EXPERT.fullmatch(name)) is not None:
            experts[int(found["layer"]), int(found["number"])] = prefix + name
        elif (found := _WITHOUT_ZERO.fullmatch(name)) is not None:
            whole_optimizers[int(found["rank"])] = prefix + name
    if None in model and len(model) > 1:
        what = "has model files of two saves: one of ZeRO-3 and one of another stage"
        raise damaged(root, what, action="Remove those of another save.")
    return FoundFiles(prefix, root, model, optim, experts, whole_optimizers)


def complete_files(found: FoundFiles, world_size: int) -> RankFiles:
    """The files by rank. Refuses a checkpoint of `world_size` ranks in which some are missing, or that has others."""
    ranks = range(world_size)
    model_ranks: Sequence[int | None] = ranks if found.is_partitioned else [None]
    missing = [_model_name(rank) for rank in model_ranks if rank not in found.model]
    lost = [rank for rank in ranks if rank not in found.optim]
    missing += [_optim_name(rank, found) for rank in lost]
    if missing:
        raise _missing(found, missing, len(model_ranks) + world_size, has_model=bool(found.model))
    more = [key for rank, key in found.optim.items() if rank >= world_size]
    more += [key for rank, key in found.model.items() if rank is not None and rank >= world_size]
    if more:
        what = f"is of {count(world_size, 'rank')}, but has {count(len(more), 'file')} of further ranks"
        details = [key.removeprefix(found.prefix) for key in sorted(more)[:_SHOWN]]
        action = "Another save left them. Remove them, if they are older."
        raise damaged(found.root, what, action=action, details=details)
    return RankFiles(
        tuple(found.model[rank] for rank in model_ranks),
        tuple(found.optim[rank] for rank in ranks),
        found.is_partitioned,
    )


def missing_experts(found: FoundFiles, counts: Sequence[int]) -> HoldfastError | None:
    """The error for a folder whose files of experts are not those of as many layers with so many experts each."""
    wanted = {(layer, number) for layer, total in enumerate(counts) for number in range(total)}
    if missing := sorted(wanted - found.experts.keys()):
        what = f"lacks {count(len(missing), 'file')} of {count(len(wanted), 'expert')}"
        details = [f"{expert_name(*each)} is missing" for each in missing[:_SHOWN]]
        return damaged(found.root, what, action="Copy the missing files again.", details=details)
    if more := sorted(found.experts.keys() - wanted):
        what = f"has {count(len(more), 'file')} of experts that its model does not have"
        details = [expert_name(*each) for each in more[:_SHOWN]]
        action = "Another save left them. Remove them, if they are older."
        return damaged(found.root, what, action=action, details=details)
    return None


def missing_optimizers(found: FoundFiles, size: int) -> HoldfastError | None:
    """The error for a folder whose optimizer files are not those of so many expert-parallel ranks."""
    ranks = set(range(size))
    for what, others in (
        ("lacks", ranks - found.whole_optimizers.keys()),
        ("has", found.whole_optimizers.keys() - ranks),
    ):
        if others:
            action = "Copy the missing files again." if what == "lacks" else "Remove those of another save."
            details = [f"expp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in sorted(others)[:_SHOWN]]
            text = f"{what} {count(len(others), 'optimizer file')} of {count(size, 'expert-parallel rank')}"
            return damaged(found.root, text, action=action, details=details)
    return None


def expert_name(layer: int, number: int) -> str:
    """The name of the file of an expert."""
    return f"layer_{layer}_expert_{number}_mp_rank_00_model_states.pt"


def _is_state(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in (_MODEL, _OPTIM, _EXPERT, _WITHOUT_ZERO, _OTHER_PARALLEL))


def _tag(folder: ForeignFolder, file: str = LATEST) -> str:
    """The tag that ``latest`` names, or another file."""
    data = folder.storage.read(file, limit=_MAX_TAG_NBYTES)
    tag = data.decode("utf-8", "replace").strip()
    if not tag or any(part in ("", ".", "..") for part in tag.split("/")) or "\\" in tag or "\0" in tag:
        raise damaged(folder.path(file), f"names no folder of a checkpoint: {tag!r:.100}")
    return tag


def _no_such_tag(folder: ForeignFolder, tag: str) -> HoldfastError:
    others = [name for name in folder.names if any(map(_is_state, folder.storage.list(name)))]
    action = f"Load one of the other folders by its path: {', '.join(others[:_SHOWN])}." if others else ""
    what = f"names {tag!r:.100}, where no files of a DeepSpeed checkpoint are"
    return damaged(folder.path(LATEST), what, action=action)


def _check_parallel(root: str, names: Iterable[str]) -> None:
    """Refuse what pipelines and model-parallel ranks wrote."""
    names = tuple(names)
    other = next((name for name in names if _OTHER_PARALLEL.fullmatch(name)), None)
    if other is not None:
        what = f"was saved by a pipeline or by an old DeepSpeed with experts ({other}), which holdfast does not read"
        raise unreadable(root, what, action=_TO_UNIVERSAL)
    patterns = (_MODEL, _OPTIM, _EXPERT, _WITHOUT_ZERO)
    found = (next(filter(None, (pattern.fullmatch(name) for pattern in patterns)), None) for name in names)
    degrees = {int(each["mp"]) for each in found if each is not None}
    if degrees != {0}:
        what = f"was saved by {count(max(degrees) + 1, 'model-parallel rank')}; holdfast reads checkpoints of one"
        raise unreadable(root, what, action=_TO_UNIVERSAL)


def _model_name(rank: int | None) -> str:
    return f"{'' if rank is None else f'zero_pp_rank_{rank}_'}mp_rank_00_model_states.pt"


def _optim_name(rank: int, found: FoundFiles) -> str:
    like = next(iter(found.optim.values()), "").removeprefix(found.prefix)
    return f"{'bf16_' if like.startswith('bf16_') else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def _missing(found: FoundFiles, missing: Sequence[str], total: int, *, has_model: bool) -> HoldfastError:
    what = f"lacks {count(len(missing), 'file')} of {total}"
    details = [f"{name} is missing" for name in missing[:_SHOWN]]
    action = "Copy the missing files again."
    if has_model and not found.is_partitioned:
        (model,) = found.model.values()
        details.append(f"{model.removeprefix(found.prefix)} has all weights, in the precision of the module")
        action += " Without them there are no master weights and no optimizer: torch.load reads the module's weights."
    else:
        details.append("each tensor is cut over all ranks, so no tensor is whole without them")
    return damaged(found.root, what, action=action, details=details)
