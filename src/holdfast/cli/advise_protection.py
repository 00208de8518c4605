"""``holdfast advise --protect``: what copies and parity of snapshots cost, and what they survive, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
from rich.console import Console

from holdfast.cli.amounts import bytes_in, checked_bandwidth
from holdfast.cli.screen import Listing, console, print_json, say
from holdfast.errors import ConfigurationError
from holdfast.protection import Copies, Parity
from holdfast.protection.cards import NodeCard
from holdfast.protection.footprint import footprint
from holdfast.protection.placement import place_copies, place_parity
from holdfast.protection.survival import least_survival, survival
from holdfast.reports import size
from holdfast.wording import count, duration

_POLICIES: Final = (None, Copies(1), Copies(2), Parity(1), Parity(2))
#: The numbers of nodes lost at once that the advice tells of.
_LOSSES: Final = (1, 2, 3, 4)
#: The placement of more nodes in domains takes too long for a command.
_MAX_PLACED_NODES: Final = 16_384
#: Characters of the longest bar of a plot.
_BAR_WIDTH: Final = 40


class ProtectionQuestion(NamedTuple):
    """The options of the command, as the user wrote them; "" or 0 for those that are left out."""

    protect: str
    nodes: int
    generations: int
    network: str
    domains: int


class PolicyAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """The costs of a policy for each node, and what it survives. `sent_s` and `rebuilt_s` are null where no network is
    given.

    `survival` has the probability that no snapshot is lost with 1, 2, ... random nodes; if not `is_exact`, it is a
    lower limit. `survives_domain`: the loss of any one failure domain loses no snapshot; null where no domains are
    given.
    """

    policy: str
    memory_nbytes: int
    sent_nbytes: int
    sent_s: float | None
    rebuilt_nbytes: int
    rebuilt_s: float | None
    survival: list[float]
    is_exact: bool
    survives_domain: bool | None


class ProtectionDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The document that ``--json`` prints. `impossible` has the reason for each policy that this job cannot have."""

    num_nodes: int
    nbytes: int
    generations: int
    policies: list[PolicyAdvice]
    impossible: dict[str, str]


def protection_advice(question: ProtectionQuestion, *, as_json: bool) -> None:
    """Print what each policy costs and survives. Raises `ConfigurationError` for numbers that make no sense."""
    nbytes = _checked_nbytes(question)
    speed = checked_bandwidth(question.network) if question.network else None
    policies, impossible = [], {}
    for policy in _POLICIES:
        try:
            policies.append(_advice_of(policy, question, nbytes, speed))
        except ConfigurationError as error:
            impossible[_name(policy)] = error.message
    document = ProtectionDocument(
        num_nodes=question.nodes,
        nbytes=nbytes,
        generations=question.generations,
        policies=policies,
        impossible=impossible,
    )
    if as_json:
        print_json(document)
    else:
        _show(console(), document)


def _checked_nbytes(question: ProtectionQuestion) -> int:
    nbytes = bytes_in(question.protect)
    if not nbytes:
        raise _invalid(f"--protect {question.protect} is no size.", "Give the snapshot of a node, such as 480GB.")
    if not question.nodes:
        raise _invalid("nobody says how many nodes protect each other.", "Add --nodes, such as 128.")
    if question.domains > question.nodes:
        domains = count(question.domains, "domain")
        raise _invalid(
            f"{count(question.nodes, 'node')} cannot lie in {domains}.", "Pass no more --domains than nodes."
        )
    if question.domains and question.nodes > _MAX_PLACED_NODES:
        raise _invalid(
            f"no advice has domains for more than {_MAX_PLACED_NODES:,} nodes.", "Pass fewer --nodes, or no --domains."
        )
    return nbytes


def _invalid(problem: str, action: str) -> ConfigurationError:
    return ConfigurationError(problem, code="config.advice", action=action)


def _advice_of(
    policy: Copies | Parity | None, question: ProtectionQuestion, nbytes: int, speed: float | None
) -> PolicyAdvice:
    """The advice on one policy. Raises `ConfigurationError` if the job cannot have it."""
    if policy is not None:
        policy.check_nodes(question.nodes)
    num_fatal = _fatal_sets(policy, question)
    cost = footprint(policy, num_nodes=question.nodes, nbytes=nbytes, generations=question.generations)
    losses = [lost for lost in _LOSSES if lost <= question.nodes]
    return PolicyAdvice(
        policy=_name(policy),
        memory_nbytes=cost.memory_nbytes,
        sent_nbytes=cost.sent_nbytes,
        sent_s=cost.sent_nbytes / speed if speed else None,
        rebuilt_nbytes=cost.rebuilt_nbytes,
        rebuilt_s=cost.link_nbytes / speed if speed else None,
        survival=[
            survival(policy, question.nodes, lost)
            if num_fatal is None or not isinstance(policy, Copies)
            else least_survival(num_fatal, size=policy.n + 1, num_nodes=question.nodes, num_lost=lost)
            for lost in losses
        ],
        is_exact=num_fatal is None,
        survives_domain=policy is not None and question.domains > 1 if question.domains else None,
    )


def _fatal_sets(policy: Copies | Parity | None, question: ProtectionQuestion) -> int | None:
    """The number of least sets of nodes whose loss loses a snapshot, where domains lead to another placement than that
    of GEMINI; else None. Raises `ConfigurationError` if the domains allow no placement."""
    if policy is None or not question.domains:
        return None
    cards = [
        NodeCard(f"{node:06}", f"{node:06}", (node,), (f"domain {node * question.domains // question.nodes}",))
        for node in range(question.nodes)
    ]
    if isinstance(policy, Parity):
        place_parity(cards, policy)
        return None
    holders = place_copies(cards, policy.n).holders
    found = len({frozenset((owner, *held)) for owner, held in enumerate(holders)})
    num_groups, left = divmod(question.nodes, policy.n + 1)
    expected = num_groups if not left else num_groups + policy.n + left
    return None if found == expected else found


def _name(policy: Copies | Parity | None) -> str:
    if policy is None:
        return "none"
    return f"Copies({policy.n})" if isinstance(policy, Copies) else f"Parity({policy.losses})"


def _show(screen: Console, document: ProtectionDocument) -> None:
    generations = count(document.generations, "generation")
    say(screen, f"Snapshots of {size(document.nbytes)} on each of {count(document.num_nodes, 'node')}, {generations}.")
    screen.print()
    table = Listing("protect", "memory/node", "sent/save", "sent in", "rebuild moves", "rebuilt in", "a domain lost")
    for each in document.policies:
        table.add_row(*_row(each))
    screen.print(table)
    screen.print()
    say(screen, "Memory of a node:", "bold")
    most = max(each.memory_nbytes for each in document.policies)
    for each in document.policies:
        _bar(screen, each.policy, [size(each.memory_nbytes)], each.memory_nbytes / most)
    screen.print()
    say(screen, "No snapshot is lost if so many random nodes are lost at once:", "bold")
    losses = [f"{lost}" for lost in _LOSSES[: len(document.policies[0].survival)]]
    say(screen, f"  {'':<9}" + "".join(f"  {lost:>10}" for lost in losses))
    for each in document.policies:
        _bar(screen, each.policy, [_chance(share, each) for share in each.survival], each.survival[-1])
    for policy, reason in document.impossible.items():
        screen.print()
        say(screen, f"{policy} is not possible: {reason}", "yellow")


def _row(each: PolicyAdvice) -> Sequence[str]:
    lost = {True: "loses nothing", False: "loses snapshots", None: "-"}[each.survives_domain]
    if each.policy == "none":
        return each.policy, size(each.memory_nbytes), "-", "-", "impossible", "-", lost
    times = ["-" if seconds is None else duration(seconds) for seconds in (each.sent_s, each.rebuilt_s)]
    rebuilt = size(each.rebuilt_nbytes)
    return each.policy, size(each.memory_nbytes), size(each.sent_nbytes), times[0], rebuilt, times[1], lost


def _chance(share: float, each: PolicyAdvice) -> str:
    if share in {0, 1}:
        return f"{100 * share:.0f} %"
    text = "> 99.99 %" if share > 0.9999 else f"{100 * share:.2f} %"
    return text if each.is_exact or share > 0.9999 else f">= {text}"


def _bar(screen: Console, name: str, cells: Sequence[str], share: float) -> None:
    bar = "#" * round(_BAR_WIDTH * share)
    say(screen, f"  {name:<9}" + "".join(f"  {cell:>10}" for cell in cells) + f"  {bar}".rstrip())
