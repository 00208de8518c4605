"""The parallel groups that the meshes of a state tell."""

from __future__ import annotations

from holdfast.checkpointer.parallel_groups import parallel_groups
from holdfast.plan.layout import Mesh, Placed, Shard, TensorLayout
from holdfast.state.collect import LocalTensor


def on(mesh: Mesh) -> LocalTensor:
    placed = Placed(mesh, tuple(Shard(0) for _ in mesh.shape))
    return LocalTensor(TensorLayout("w", "F32", (64,), placed), ())


def groups(rank: int, *meshes: Mesh, world_size: int = 8) -> set[str]:
    return set(parallel_groups([on(mesh) for mesh in meshes], rank=rank, world_size=world_size))


def test_ranks_share_a_label_exactly_where_they_are_in_one_group() -> None:
    mesh = Mesh((4, 2), tuple(range(8)))  # data by tensor
    assert len(groups(0, mesh)) == 2
    assert len(groups(0, mesh) & groups(1, mesh)) == 1  # a tensor group
    assert len(groups(0, mesh) & groups(2, mesh)) == 1  # a data group
    assert not groups(0, mesh) & groups(3, mesh)


def test_a_group_of_all_ranks_tells_nothing_and_a_stage_of_a_pipeline_is_a_group() -> None:
    assert groups(3, Mesh((8,), tuple(range(8)))) == set()
    first, last = Mesh((4,), (0, 1, 2, 3)), Mesh((4,), (4, 5, 6, 7))
    assert groups(0, first) == groups(3, first) != groups(4, last)
    assert groups(0, last) == set()
