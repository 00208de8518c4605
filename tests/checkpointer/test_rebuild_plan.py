"""The slots that a restore rebuilds from parity, and the nodes where it rebuilds them."""

from __future__ import annotations

import msgspec

from holdfast.checkpointer.rebuild_plan import AwayShare, NodeShare, plan_rebuild, plan_with_away, taking_part
from holdfast.node_memory.parity_records import GroupNode, ParityGroup, ParityRecord, SlotDigests
from holdfast.node_memory.slots import SlotFile

MIB = 1 << 20


def group_of(num_nodes: int, losses: int, *, per_node: int = 1) -> ParityGroup:
    """Nodes "a", "b", ... with files in the order of their ranks."""
    nodes = []
    for number in range(num_nodes):
        ranks = range(number * per_node, (number + 1) * per_node)
        slots = tuple(SlotDigests(rank, (SlotFile(rank, 0, 4096, MIB),), (f"{rank:032x}",)) for rank in ranks)
        nodes.append(GroupNode(chr(ord("a") + number), slots))
    return ParityGroup(tuple(nodes), losses)


def shares_of(group: ParityGroup, ranks: dict[str, list[int]]) -> dict[str, NodeShare]:
    """The nodes that are left, with all that they had; new ones have nothing."""
    striping, found = group.striping, {}
    held = {node.identity: node for node in group.nodes}
    for identity, here in ranks.items():
        rows = [
            ParityRecord(group, striping.stripe(identity, row), row) for row in striping.parity_rows if identity in held
        ]
        own = held[identity].files if identity in held else {}
        found[identity] = NodeShare(here, own, rows if identity in held else [])
    return found


def test_what_a_new_node_replaces_is_rebuilt_there_by_its_ranks() -> None:
    group = group_of(4, 1, per_node=2)
    shares = shares_of(group, {"a": [0, 1], "new": [2, 3], "c": [4, 5], "d": [6, 7]})
    plan = plan_rebuild([2, 3], shares)
    assert plan is not None
    (lost,) = plan
    assert lost.lost == (1,)
    assert {each.slot.rank for each in lost.slots} == {2, 3}
    assert {each.executor for each in lost.slots} == {2, 3}


def test_a_new_node_without_room_leaves_what_was_lost_to_the_others() -> None:
    group = group_of(4, 1, per_node=2)
    shares = shares_of(group, {"a": [0, 1], "new": [], "c": [4, 5], "d": [6, 7]})
    plan = plan_rebuild([2, 3], shares)
    assert plan is not None
    executors = [each.executor for lost in plan for each in lost.slots]
    assert len(executors) == 2
    assert not {2, 3} & set(executors)


def test_nothing_is_planned_where_no_node_has_room() -> None:
    group = group_of(4, 1)
    shares = shares_of(group, {"a": [], "c": [], "d": []})
    assert plan_rebuild([1], shares) is None
    away = [AwayShare("b", group.nodes[1].slots, (), ())]
    assert plan_with_away([1], away, shares) is None
    assert plan_rebuild([], shares) == ()


def test_what_was_lost_is_shared_by_the_nodes_that_are_left() -> None:
    group = group_of(4, 1, per_node=3)
    shares = shares_of(group, {"a": [0, 1, 2], "c": [3, 4, 5], "d": [6, 7, 8]})
    plan = plan_rebuild([3, 4, 5], shares)
    assert plan is not None
    executors = {each.executor for lost in plan for each in lost.slots}
    assert {executor // 3 for executor in executors} == {0, 1, 2}


def test_a_node_that_lacks_a_row_or_has_another_file_counts_as_lost() -> None:
    group = group_of(4, 2)
    shares = shares_of(group, {"a": [0], "b": [1], "d": [2]})
    assert plan_rebuild([2], shares) is not None
    shares["b"] = shares["b"]._replace(rows=shares["b"].rows[:1])
    plan = plan_rebuild([2], shares)
    assert plan is not None
    assert plan[0].lost == (1, 2)
    shares["d"] = shares["d"]._replace(own={3: "0" * 32})
    assert plan_rebuild([2], shares) is None


def test_files_of_nodes_that_are_in_no_group_cannot_be_rebuilt() -> None:
    group = group_of(3, 1)
    shares = shares_of(group, {"a": [0], "b": [1]})
    assert plan_rebuild([2], shares) is not None
    assert plan_rebuild([2, 3], shares) is None
    assert plan_rebuild([2], {name: share._replace(rows=[]) for name, share in shares.items()}) is None


def test_the_parity_of_two_groups_gives_what_each_of_them_lost() -> None:
    first = group_of(3, 1)
    second = ParityGroup(
        tuple(
            GroupNode(
                node.identity.upper(),
                tuple(
                    msgspec.structs.replace(
                        slot, rank=slot.rank + 3, files=(msgspec.structs.replace(slot.files[0], file=slot.rank + 3),)
                    )
                    for slot in node.slots
                ),
            )
            for node in first.nodes
        ),
        1,
    )
    shares = shares_of(first, {"a": [0], "b": [1]}) | shares_of(second, {"B": [2], "C": [3]})
    plan = plan_rebuild([2, 3], shares)
    assert plan is not None
    assert {(lost.group, lost.lost) for lost in plan} == {(first, (2,)), (second, (0,))}


def test_the_keeper_of_a_node_that_counts_as_lost_has_no_part_in_a_rebuild() -> None:
    """A keeper that stood still was waited for again and again, and no other way was used."""
    group = group_of(4, 2)
    plan = plan_rebuild([1, 3], shares_of(group, {"a": [0], "c": [1]}))
    assert plan is not None
    assert taking_part(plan, (), ["a", "c", "d"]) == ("a", "c")


def test_the_keeper_of_a_new_node_has_a_part_in_a_rebuild() -> None:
    group = group_of(4, 1)
    plan = plan_rebuild([1], shares_of(group, {"a": [0], "new": [1], "c": [2], "d": [3]}))
    assert plan is not None
    assert taking_part(plan, (), ["a", "new", "c", "d"]) == ("a", "c", "d", "new")


def away_share(group: ParityGroup, identity: str) -> AwayShare:
    """The node, with all that it had, where it has no part in the job."""
    share = shares_of(group, {identity: []})[identity]
    (node,) = [node for node in group.nodes if node.identity == identity]
    return AwayShare(identity, node.slots, (), share.rows)


def test_a_node_without_a_part_in_the_job_sends_its_slots_and_helps_to_rebuild_those_of_a_lost_one() -> None:
    group = group_of(4, 1)
    plan = plan_with_away([1, 3], [away_share(group, "b")], shares_of(group, {"a": [0], "c": [1]}))
    assert plan is not None
    assert [(each.away.node, each.away.slot.rank) for each in plan.fetched] == [("b", 1)]
    assert [(each.lost, [slot.slot.rank for slot in each.slots]) for each in plan.lost] == [((3,), [3])]
    assert {each.executor for each in plan.fetched} | {each.executor for each in plan.lost[0].slots} <= {0, 1}


def test_nodes_without_a_part_in_the_job_that_hold_too_little_give_no_plan() -> None:
    group = group_of(4, 1)
    away = away_share(group, "b")
    shares = shares_of(group, {"a": [0]})
    assert plan_with_away([1, 2, 3], [away], shares) is None
    assert plan_with_away([1, 3], [away._replace(rows=())], shares_of(group, {"a": [0], "c": [1]})) is None
