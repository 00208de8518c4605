"""The names of optimizers in DCP folders: those of ``torch.distributed.checkpoint.state_dict.get_state_dict``.

Stock jobs load the dict of that function. It names a parameter as its module does, and each group lists the names of
its parameters. Holdfast stores the full names of parameters, since an optimizer may train those of several modules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from holdfast.exporting.chosen_tensors import ChosenContent, embedding_likeness
from holdfast.exporting.chosen_values import KeyPath, key_path
from holdfast.format.names import join, parse_component
from holdfast.format.values import Node, Open, Plain

#: The keys that are stored beside ``state`` and ``param_groups``, and follow from the live optimizer.
_OWN: Final = ("class", "group_of", "order")


@dataclass
class DcpOptimizers:
    """The paths of keys that differ from the stored names, by name (`paths`), and further ones for the other names of a
    tied parameter (`copies`); values that a folder has beside the stored ones, by their paths (`added`); and the names
    that it lacks (`dropped`)."""

    paths: dict[str, KeyPath] = field(default_factory=dict)
    copies: dict[str, list[KeyPath]] = field(default_factory=dict)
    added: dict[KeyPath, list[str]] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)


def dcp_optimizers(choice: ChosenContent) -> DcpOptimizers:
    """The names that DCP has for the optimizers in the chosen content.

    An optimizer that trains the parameters of several modules, or of none, keeps its stored names: no dict of
    ``get_state_dict`` has them.
    """
    found = DcpOptimizers()
    nodes = choice.table.nodes
    chosen = [*choice.values, *(one.names[0] for one in choice.tensors)]
    for path in [path for path, node in nodes.items() if node == Open("optimizer")]:
        group_of = dict(_group_of(path, nodes))
        module = _module_of(group_of, nodes)
        if module:
            _rename(found, path, _names_inside(module, group_of, choice), group_of, chosen, nodes)
    return found


def _rename(
    found: DcpOptimizers,
    path: str,
    inside: Mapping[str, Sequence[str]],
    group_of: Mapping[str, int],
    chosen: list[str],
    nodes: Mapping[str, Node],
) -> None:
    """Add the optimizer at `path` to `found`. `inside` has the names of its parameters in their module."""
    base = key_path(path, nodes)
    slots, groups = join(path, "state") + "/", join(path, "param_groups") + "/"
    listed: set[int] = set()
    for name in chosen:
        if name.startswith(slots):
            parameter = _parameter_of(name.removeprefix(slots), inside)
            if parameter:
                slot = key_path(name, nodes)[len(key_path(slots + parameter, nodes)) :]
                found.paths[name], *copies = [(*base, "state", each, *slot) for each in inside[parameter]]
                if copies:
                    found.copies[name] = copies
        elif name.startswith(groups):
            index, *below = key_path(name, nodes)[len(base) + 1 :]
            listed.add(int(index))
            found.paths[name] = (*base, "param_groups", int(index), *below)
        elif name.removeprefix(path + "/").partition("/")[0] in _OWN and name.startswith(path + "/"):
            found.dropped.add(name)
    for index in sorted(listed):
        members = [inside[name][0] for name, group in group_of.items() if group == index]
        found.added[*base, "param_groups", index, "params"] = members


def _group_of(path: str, nodes: Mapping[str, Node]) -> Iterator[tuple[str, int]]:
    """The full name of each trained parameter, and the index of its group."""
    above = join(path, "group_of") + "/"
    for name, node in nodes.items():
        if name.startswith(above) and isinstance(node, Plain) and type(node.value) is int:
            yield str(parse_component(name.removeprefix(above))), node.value


def _module_of(names: Mapping[str, int], nodes: Mapping[str, Node]) -> str:
    """The path of the one module that has all parameters with these names; "" if there is none."""
    modules = [path for path, node in nodes.items() if path and node == Open("module")]
    whole = [path for path in modules if names and all(name.startswith(path + "/") for name in names)]
    return max(whole, key=len, default="")


def _names_inside(module: str, names: Mapping[str, int], choice: ChosenContent) -> dict[str, list[str]]:
    """The names of each parameter in its module. Of a tied one, torch takes the first one in the module, which no
    checkpoint tells: it is the input embedding where there is one, which comes first here."""
    nodes, aliases = choice.table.nodes, choice.table.aliases
    every: dict[str, list[str]] = {name: [name] for name in names}
    for alias, of in sorted(aliases.items()):
        if of in every and alias.startswith(module + "/"):
            every[of].append(alias)
    above = len(key_path(module, nodes))
    return {
        name: [".".join(map(str, key_path(one, nodes)[above:])) for one in sorted(tied, key=embedding_likeness)]
        for name, tied in every.items()
    }


def _parameter_of(below: str, inside: Collection[str]) -> str:
    """The parameter that a slot belongs to, whose name begins with that of the parameter; "" for others."""
    name = below
    while name and name not in inside:
        name = name.rpartition("/")[0]
    return name
