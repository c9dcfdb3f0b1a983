"""A pipe between two ranks of a torch.distributed group."""

from aiotensor.ranks.groups import Group
from aiotensor.ranks.pipe import RankPipe
from aiotensor.types import PipeStatistics

__all__ = ["Group", "PipeStatistics", "RankPipe"]
