"""Pipes between the ranks of a torch.distributed group: tensors in order, in both directions."""

from aiotensor.ranks.meeting import Group
from aiotensor.ranks.pipe import RankPipe

__all__ = ["Group", "RankPipe"]
