"""The rules of a mapping as values that are checked when they are made, and their form in TOML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from holdfast.decoding import decode_toml
from holdfast.errors import ConfigurationError
from holdfast.format.dtypes import DTYPES, no_dtype
from holdfast.format.patterns import Pattern, Template
from holdfast.wording import kind_of


class _Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag=str.lower):
    """The base of all rules: a value whose ``kind`` is its class's name in lower case, with ``_`` between words."""


class _OnNames(_Rule, frozen=True):
    names: str

    def __post_init__(self) -> None:
        Pattern(self.names)


class _OneToOne(_OnNames, frozen=True):
    to: str


class _OneToMany(_OnNames, frozen=True):
    to: Sequence[str]


class _ManyToOne(_Rule, frozen=True):
    names: Sequence[str]
    to: str


class Rename(_OneToOne, frozen=True):
    """Rename tensors, values and whole containers, with all that lies below them, from `names` to `to`.

    Fields of `names` can be used in `to`: ``Rename("net/{x:**}.gamma", "net/{x}.weight")``.
    """

    def __post_init__(self) -> None:
        _check_fields((self.names,), (self.to,))


class Drop(_OnNames, frozen=True):
    """Leave out tensors, values and whole containers that match `names`. The live state need not have them."""


class Cast(_OnNames, frozen=True):
    """Convert tensors that match `names` to `dtype`, as ``tensor.to(dtype)`` would. A tensor is converted once: the
    last cast of it counts, so a later rule can make an exception from an earlier one.

    As with ``module.to``, a floating dtype concerns floating tensors only. Optimizer state is cast only where `names`
    matches its own name, and step counters never. Integers become wider integers only.
    """

    dtype: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.dtype, str):
            raise TypeError(f"a rule names a dtype by its text, such as 'bfloat16', not by {self.dtype!r}")
        if self.dtype not in DTYPES:
            raise ValueError(no_dtype(self.dtype))


class Split(_OneToMany, frozen=True, kw_only=True):
    """Divide tensors along `axis` into tensors named `to`, which get `shares` of the axis (default: equal shares).

    With `groups` the axis consists of that many equal groups, and each group is divided like this: for grouped-query
    attention stored as q q q q k v per key-value head, give ``shares=(4, 1, 1), groups=<key-value heads>``. Only the
    ratio of the shares counts, so you can also give the sizes of the results.
    """

    shares: Sequence[int] | None = None
    axis: int = 0
    groups: int = 1

    def __post_init__(self) -> None:
        _keep_as_tuples(self, "to", "shares")
        _check_fields((self.names,), _several(self.to))
        _check_groups(self.groups)
        shares = self.shares
        if shares is not None and (len(shares) != len(self.to) or any(share < 1 for share in shares)):
            raise ValueError(f"shares must be positive numbers, one for each name in to ({len(self.to)}), not {shares}")


class Fuse(_ManyToOne, frozen=True, kw_only=True):
    """Lay tensors, one for each pattern in `names`, end to end along `axis` as the tensor named `to`.

    With `groups` each of the tensors consists of that many equal groups, and the groups alternate: q, k and v with
    ``groups=<key-value heads>`` give q q q q k v per key-value head.
    """

    axis: int = 0
    groups: int = 1

    def __post_init__(self) -> None:
        _keep_as_tuples(self, "names")
        _check_fields(_several(self.names), (self.to,), all_used=True)
        _check_groups(self.groups)


class Stack(_OneToOne, frozen=True, kw_only=True):
    """Stack tensors of one shape along a new `axis` as the tensor named `to`, in order of the field that `to` lacks.

    ``Stack("model/layers.{i}.{w:*}", "model/layers.{w}")`` stacks layer 0, 1 and so on; `first` is the first number.
    """

    axis: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        _check_fields((self.names,), (self.to,))
        _index_field(self.names, self.to)


class Unstack(_OneToOne, frozen=True, kw_only=True):
    """Make one tensor for each index of `axis`, without that axis; `to` has one more field than `names`, the index.

    ``Unstack("model/layers.{w:*}", "model/layers.{i}.{w}")`` gives layer 0, 1 and so on; `first` is the first number.
    """

    axis: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        _check_names((self.names,))
        _index_field(self.to, self.names)


class Transpose(_OnNames, frozen=True):
    """Reorder the axes of tensors: axis ``axes[i]`` of the stored tensor becomes axis ``i``."""

    axes: Sequence[int] = (1, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        _keep_as_tuples(self, "axes")
        if sorted(self.axes) != list(range(len(self.axes))):
            raise ValueError(f"{self.axes} is not an order of axes")


class Pad(_OnNames, frozen=True, kw_only=True):
    """Make tensors longer: `size` elements along `axis`. `fill` gives the values of the new elements.

    ``"zero"`` makes them 0. ``"keep"`` leaves them as they are in the live state, such as new rows of a vocabulary that
    are still to be trained; in optimizer state that the load creates they are 0.
    """

    size: int
    fill: Literal["keep", "zero"]
    axis: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_size(self.size)
        if self.fill not in ("keep", "zero"):
            raise ValueError(f'fill must be "keep" or "zero", not {self.fill!r}')


class Crop(_OnNames, frozen=True, kw_only=True):
    """Make tensors shorter: keep the first `size` elements along `axis`, and drop the rest, such as padding."""

    size: int
    axis: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_size(self.size)


class FromMegatron(_OnNames, frozen=True, tag="from_megatron"):
    """Make optimizers of Megatron, at the paths that `names` matches, plain optimizers of the same parameters, which
    torch's optimizers and engines of DeepSpeed load.

    The master weights become the weights. Each parameter gets the count of steps. The parameter groups get numbers, in
    the order of their names in Megatron, and keep the hyper-parameters that torch's AdamW and SGD have. Loss scalers
    are left out.
    """

    names: str = "optimizer"


class ToMegatron(_OnNames, frozen=True, tag="to_megatron"):
    """Give the parameters of plain optimizers, at the paths that `names` matches, the master weights that a job of
    Megatron in low precision takes: the weights, which must be stored in float32. Its low-precision weights are casts
    of them, which ``cast="model"`` allows.

    A load into a job of Megatron takes the moments, the count of steps, and the betas and epsilon of the groups, as
    plain optimizers and engines of DeepSpeed have them. Learning rates and weight decay follow Megatron's scheduler.
    """

    names: str = "optimizer"


Rule = Rename | Drop | Cast | Split | Fuse | Stack | Unstack | Transpose | Pad | Crop | FromMegatron | ToMegatron


class _RulesFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rule: tuple[Rule, ...]


def from_toml(text: str) -> tuple[Rule, ...]:
    """The rules of a TOML text: tables ``[[rule]]``, each with its ``kind`` and the fields of that rule.

    Raises `ConfigurationError`, code ``config.mapping``, for a text that is no list of rules.
    """
    if not isinstance(text, str):
        raise TypeError(f"from_toml takes the text of a file, such as Path(...).read_text(), not {kind_of(text)}")
    try:
        return decode_toml(text, _RulesFile).rule
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigurationError(
            f"The mapping is malformed: {error}.",
            code="config.mapping",
            action="Pass the text of the file, not its path. "
            'Write rules as tables: [[rule]], kind = "rename", names = "...", to = "...".',
        ) from error


def checked_rules(mapping: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rules of a mapping. Raises `TypeError` for anything but a list of rules."""
    if not isinstance(mapping, Iterable):
        raise TypeError(f"mapping must be a list of rules of holdfast.mapping, not {mapping!r}")
    rules = tuple(mapping)
    for rule in rules:
        if not isinstance(rule, Rule):
            raise TypeError(f"mapping must be a list of rules of holdfast.mapping, but {rule!r} is not a rule")
    return rules


def index_field(rule: Stack | Unstack) -> str:
    """The field whose number is the index along the axis that a rule adds or removes."""
    return _index_field(rule.names, rule.to) if isinstance(rule, Stack) else _index_field(rule.to, rule.names)


def _keep_as_tuples(rule: _Rule, *fields: str) -> None:
    """Turn the lists in `fields` into tuples, so that a rule made with lists equals the one made with tuples."""
    for field in fields:
        if not isinstance(getattr(rule, field), tuple | str | None):
            msgspec.structs.force_setattr(rule, field, tuple(getattr(rule, field)))


def _several(texts: Sequence[str]) -> tuple[str, ...]:
    if isinstance(texts, str) or len(texts) < 2 or len(set(texts)) < len(texts):
        raise ValueError(f"a rule needs two or more different names here, not {texts!r}")
    return tuple(texts)


def _check_names(names: tuple[str, ...]) -> list[Pattern]:
    patterns = [Pattern(text) for text in names]
    for pattern in patterns:
        if pattern.has_wildcards:
            raise ValueError(f"{pattern.text!r} is the source of new names: give its wildcards names, such as {{x:**}}")
    return patterns


def _check_fields(names: tuple[str, ...], to: tuple[str, ...], *, all_used: bool = False) -> None:
    patterns = _check_names(names)
    fields = set(patterns[0].fields)
    if any(set(pattern.fields) != fields for pattern in patterns):
        raise ValueError(f"{', '.join(names)} do not have the same fields")
    for text in to:
        made = set(Template(text).fields)
        if made - fields:
            raise ValueError(f"{text!r} has fields that {names[0]!r} lacks: {', '.join(sorted(made - fields))}")
        if all_used and made != fields:
            raise ValueError(f"{text!r} lacks fields of {names[0]!r}: {', '.join(sorted(fields - made))}")


def _check_groups(groups: int) -> None:
    if groups < 1:
        raise ValueError(f"groups is {groups}, but must be at least 1")


def _check_size(size: int) -> None:
    if size < 0:
        raise ValueError(f"size is {size}, but must not be negative")


def _index_field(single: str, stacked: str) -> str:
    """The one field that the name of a single tensor has and the name of the stacked tensor lacks."""
    fields, others = Pattern(single).fields, Pattern(stacked).fields
    lost = [field for field in fields if field not in others]
    if len(lost) != 1 or set(others) - set(fields):
        raise ValueError(f"{single!r} must have the fields of {stacked!r} and exactly one more, for the index")
    return lost[0]
