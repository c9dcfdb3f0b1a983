"""Groups of torch.distributed: the rank of this process, and the store that all ranks can reach."""

import operator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch.distributed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed does not declare it
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Group", "Membership", "membership_of"]

Group: TypeAlias = "ProcessGroup | DeviceMesh | Store"
"""What connects two ranks: a process group, a dimension of a device mesh, or a store."""


class Membership(NamedTuple):
    """The membership of this process in a group.

    Attributes:
        store: the store that all ranks of the group can reach.
        rank: the rank of this process.
        size: the number of ranks.
    """

    store: "Store"
    rank: int
    size: int


def membership_of(group: Group, rank: int | None, world_size: int | None) -> Membership:
    """Return the membership of this process in a group.

    Args:
        group: a process group, a mesh of one dimension, or a store.
        rank: the rank of this process, for a store.
        world_size: the number of ranks, for a store.

    Raises:
        TypeError: `group` is none of these, or this build of torch does not support it; or `rank` or
            `world_size` is missing for a store, or is given for another kind of group.
        ValueError: the mesh has several dimensions, or the rank is not in the group.
    """
    if not torch.distributed.is_available():
        raise TypeError("this build of torch has no torch.distributed, which RankPipe requires")
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, torch.distributed.Store):  # type: ignore[attr-defined]
        if rank is None or world_size is None:
            raise TypeError("a store does not define the ranks: pass rank and world_size as well")
        return _checked(Membership(group, operator.index(rank), operator.index(world_size)))
    if rank is not None or world_size is not None:
        raise TypeError("rank and world_size can only be passed with a store: a group defines its own")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"a mesh of {group.ndim} dimensions is not a group: select one of them, for example "
                "mesh['tp']"
            )
        group = group.get_group()
    if not isinstance(group, torch.distributed.ProcessGroup):
        raise TypeError(
            "group must be a torch.distributed.ProcessGroup, a DeviceMesh of one dimension, or a store, got "
            f"{type(group).__name__!r}: torch.distributed.group.WORLD is the default group, and new_group "
            "returns no group to processes that are not in it"
        )
    return _checked(Membership(_store_of(group), group.rank(), group.size()))


def _store_of(group: "ProcessGroup") -> "Store":
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    # Old versions of torch, such as 2.6, only have this internal table.
    from torch.distributed.distributed_c10d import _world

    if group not in _world.pg_map:
        raise TypeError("this version of torch has no store for this group: pass the store itself")
    return _world.pg_map[group][1]


def _checked(membership: Membership) -> Membership:
    if not 0 <= membership.rank < membership.size:
        raise ValueError(f"there is no rank {membership.rank} in a group of {membership.size}")
    return membership
