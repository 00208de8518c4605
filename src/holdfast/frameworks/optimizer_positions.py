"""Optimizers of checkpoints that know parameters by their position alone, as ``Optimizer.state_dict()`` does.

In place of a name such a checkpoint has the component of a number: ``%int=0`` is the first parameter of the first
group, and the numbers go on through the groups. Torch's own contract is that the live optimizer has its parameters in
the same order, in groups of the same sizes. No name of a live tensor looks like that: names begin with a key of the
state, which is a text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from holdfast.errors import IncompatibleError
from holdfast.format.names import component
from holdfast.frameworks import NamedTensor
from holdfast.geometry import Shape
from holdfast.wording import count

_NUMBER: Final = component(0).removesuffix("0")


def is_position(name: str) -> bool:
    """Whether the name of a parameter in a checkpoint is its position."""
    return name.startswith(_NUMBER)


def _advice(path: str) -> str:
    return (
        "Give the optimizer the groups, and the order of parameters, that it had when the checkpoint was written, or "
        f'leave it out, with select="!{path}".'
    )


def check_order_of(path: str, parameter: NamedTensor, stored: Shape) -> None:
    """Refuse a live `parameter` whose state has the `stored` shape, not its own, if its name is a position.

    Raises `IncompatibleError`, code ``incompatible.optimizer``: the live optimizer most likely has another order, so
    parameters of equal shapes would get the state of each other.
    """
    if is_position(parameter.name):
        raise IncompatibleError(
            f"The checkpoint knows the parameters of optimizer {path!r} by their order alone, and parameter "
            f"{parameter.name.removeprefix(_NUMBER)} has the shape {tuple(parameter.tensor.shape)} here, but state of "
            f"shape {tuple(stored)} there. So the order is another one, or a parameter was resized.",
            code="incompatible.optimizer",
            action=_advice(path),
            path=path,
        )


def as_stored(
    path: str, index: int, found: Sequence[NamedTensor], group_of: Mapping[str, int]
) -> Sequence[NamedTensor]:
    """The parameters `found` of live group `index` under their names in the checkpoint. `group_of` has the stored group
    of each stored name. Changes nothing unless these names are positions.

    Raises `IncompatibleError`, code ``incompatible.optimizer``, for a group of another size than the stored one.
    """
    if not group_of or not all(map(is_position, group_of)):
        return found
    sizes = Counter(group_of.values())
    if len(found) != sizes[index]:
        raise IncompatibleError(
            f"Group {index} of optimizer {path!r} has {count(len(found), 'parameter')} here and {sizes[index]} in the "
            "checkpoint, which knows parameters by their order alone.",
            code="incompatible.optimizer",
            action=_advice(path),
            path=path,
        )
    first = sum(sizes[before] for before in range(index))
    return [msgspec.structs.replace(entry, name=component(first + at)) for at, entry in enumerate(found)]
