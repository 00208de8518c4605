"""Numbers as keys of dicts, for checkpoints of systems that store them as text.

DCP names the state of parameter 0 in ``optimizer.state_dict()`` ``optim.state.0``, whether the key was 0 or "0". The
live state knows which, so a load from such a checkpoint asks it, and renames the stored names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from holdfast.format.names import component, join
from holdfast.mapping import Rename


def number_rules(into: Mapping[str, object], is_stored: Callable[[str], bool]) -> tuple[Rename, ...]:
    """The rules that give stored entries the numbers that they have as keys in `into`.

    `is_stored` says whether the checkpoint has a name. A key 3 counts where the checkpoint has the text ``3`` in its
    place, and `into` does not have this text as a key, too.
    """
    return tuple(_rules(into, is_stored, "", ""))


def _rules(item: object, is_stored: Callable[[str], bool], path: str, old: str) -> Iterator[Rename]:
    """The rules for `item`, which is at `path`, and in the checkpoint at `old`; outer ones first."""
    if isinstance(item, list | tuple):
        parts = [(str(at), str(at), one) for at, one in enumerate(item)]
    elif isinstance(item, dict):
        texts = {key: str(key) for key in item if type(key) is int}
        numbers = {
            key: text
            for key, text in texts.items()
            if text not in item and is_stored(join(old, text)) and not is_stored(join(old, component(key)))
        }
        if "*" in path:
            numbers = {}  # a rule cannot name this container, since the star stands for any text
        elif numbers and len(texts) == len(item):
            yield _rename(path, "{i}", "%int={i}")  # one rule, whatever the number of parameters
        else:
            yield from (_rename(path, text, component(key)) for key, text in numbers.items())
        parts = [(component(key), numbers.get(key) or component(key), one) for key, one in item.items()]
    else:
        return
    for part, stored_part, inner in parts:
        if isinstance(inner, dict | list | tuple):
            yield from _rules(inner, is_stored, join(path, part), join(old, stored_part))


def _rename(path: str, key: str, to: str) -> Rename:
    literal = path.replace("{", "{{").replace("}", "}}")
    return Rename(join(literal, key), join(literal, to))
