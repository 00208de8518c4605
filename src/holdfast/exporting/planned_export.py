"""An export, planned whole: its options, checked, and the folder that it will write. Nothing is written here."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from holdfast.checkpoint.stored_state import StoredState
from holdfast.errors import ConfigurationError
from holdfast.exporting.chosen_tensors import ChosenContent, choose
from holdfast.exporting.element_source import check_equal
from holdfast.exporting.hugging_face_folder import hugging_face_folder
from holdfast.exporting.new_folder import NewFolder
from holdfast.exporting.peft_folder import peft_folder
from holdfast.format.patterns import Globs
from holdfast.interop.formats import find_state
from holdfast.mapping import Cast, Rule
from holdfast.mapping.parts import is_floating
from holdfast.mapping.rules import checked_rules
from holdfast.options import checked_number
from holdfast.run.leases import leased
from holdfast.run.paths import Selection

#: Most bytes of tensors in one new file, as Hugging Face has it.
SHARD_NBYTES: Final = 5_000_000_000
_LEAST: Final = "files without room for tensors are none"
_FORMATS: Final = ("hf", "peft", "dcp", "megatron", "deepspeed-universal")
#: Those that have optimizers and values, too; they need torch's own classes.
_WITH_VALUES: Final = ("dcp", "megatron", "deepspeed-universal")


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """The options of an export, checked as far as they can be without a checkpoint. `rules` are those of the mapping
    with that of `dtype`; `is_mapped` says that there are others."""

    to: str
    select: tuple[str, ...] | None
    rules: tuple[Rule, ...]
    is_mapped: bool
    dtype: str | None
    shard_nbytes: int
    config: Path | None
    adapter: str | None


class PlannedExport(NamedTuple):
    """The state that an export reads, the folder that it writes, and the number of values in that."""

    state: StoredState
    folder: NewFolder
    num_values: int


def export_settings(
    to: str,
    *,
    select: str | Sequence[str] | None = None,
    mapping: Sequence[Rule] | None = None,
    dtype: str | None = None,
    shard_nbytes: int = SHARD_NBYTES,
    config: str | os.PathLike[str] | None = None,
    adapter: str | None = None,
) -> ExportSettings:
    """The options of `holdfast.export`, checked. Raises `ConfigurationError`, code ``config.export``, for options that
    do not fit together, and `TypeError` or `ValueError` for those that are wrong by themselves."""
    _check_format(to, config, adapter)
    globs = None if select is None else (select,) if isinstance(select, str) else tuple(select)
    if globs is not None:
        Globs(globs)  # refuses those that are none
    return ExportSettings(
        to=to,
        select=globs,
        rules=_rules(mapping, dtype),
        is_mapped=bool(mapping),
        dtype=dtype,
        shard_nbytes=checked_number("shard_nbytes", shard_nbytes, least=1, reason=_LEAST),
        config=None if config is None else Path(config),
        adapter=adapter,
    )


@contextmanager
def planned(target: Selection, settings: ExportSettings) -> Iterator[PlannedExport]:
    """A ``with`` block that has the planned export of the checkpoint `target`, and keeps that from being deleted.

    Raises as `holdfast.export`, before anything is written.
    """
    found = find_state(target)
    lease = None if found.located is None else leased(found.located)
    try:
        state = found.state
        _check_dtype(state, settings.dtype)
        choice = choose(
            state,
            select=None if settings.select is None else Globs(settings.select),
            rules=settings.rules,
            model_only=settings.to not in _WITH_VALUES,
            is_mapped=settings.is_mapped,
        )
        _find_places(state, choice)
        check_equal(state, choice.equal)
        yield PlannedExport(state, _folder(choice, state, settings), len(choice.values))
    finally:
        if lease is not None:
            lease.end()


def _check_dtype(state: StoredState, dtype: str | None) -> None:
    """Refuse a dtype for a state without floating tensors: it would change nothing."""
    numbers = state.numbers.values()
    if dtype is not None and not any(is_floating(state.manifest.dtype(number)) for number in numbers):
        raise ConfigurationError(
            f"dtype={dtype!r} would change nothing: {state.folder} has no floating tensors.",
            code="config.export",
            action="Leave out dtype (--dtype).",
            path=state.folder,
        )


def _find_places(state: StoredState, choice: ChosenContent) -> None:
    """Find the stored parts of all that was chosen; what was left out may be unreadable."""
    parts = (part for one in choice.tensors for part in one.tensor.parts)
    state.find_places({state.numbers[part.source] for part in parts if part.source is not None})


def _check_format(to: str, config: object, adapter: object) -> None:
    if to not in _FORMATS:
        raise ConfigurationError(
            f"{to!r} is no format that holdfast writes.",
            code="config.export",
            action=f"Choose one of {', '.join(_FORMATS)}.",
        )
    if to in _WITH_VALUES and config is not None:
        raise ConfigurationError(
            f"a folder of {to} has no configuration of a model.",
            code="config.export",
            action="Leave out config (--config), or export to hf.",
        )
    if to == "peft" and config is None:
        raise ConfigurationError(
            "an adapter needs its configuration.",
            code="config.export",
            action="Name a folder that has adapter_config.json: config (--config).",
        )
    if to != "peft" and adapter is not None:
        raise ConfigurationError(
            f"a folder of {to} is not that of an adapter.",
            code="config.export",
            action="Leave out adapter (--adapter), or export to peft.",
        )


def _rules(mapping: Sequence[Rule] | None, dtype: str | None) -> tuple[Rule, ...]:
    """The rules to apply. The cast to `dtype` comes first, so that casts of the mapping are exceptions from it."""
    rules = checked_rules(() if mapping is None else mapping)
    if dtype is None:
        return rules
    cast = Cast("**", dtype)
    if not is_floating(dtype):
        raise ValueError(f"dtype must be a floating dtype, such as 'bfloat16', not {dtype!r}")
    return (cast, *rules)


def _folder(choice: ChosenContent, state: StoredState, settings: ExportSettings) -> NewFolder:
    identity, limit = state.record.identity, settings.shard_nbytes
    if settings.to == "megatron":
        from holdfast.exporting.megatron_folder import megatron_folder  # as the next two, it imports torch

        return megatron_folder(choice, state, shard_nbytes=limit)
    if settings.to == "deepspeed-universal":
        from holdfast.exporting.universal_folder import universal_folder

        return universal_folder(choice, state)
    if settings.to == "dcp":
        from holdfast.exporting.dcp_folder import dcp_folder

        return dcp_folder(choice, identity=identity, shard_nbytes=limit)
    if settings.to == "peft":
        assert settings.config is not None
        return peft_folder(choice, identity=identity, config=settings.config, adapter=settings.adapter)
    return hugging_face_folder(
        choice, identity=identity, shard_nbytes=limit, config=settings.config, dtype=settings.dtype
    )
