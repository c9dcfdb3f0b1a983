"""The tensors and the blocks of a message that is being published."""

from aiotensor.protocol.broadcast import PlacedTensor
from aiotensor.tensors.allocations import Block
from aiotensor.tensors.dtypes import DTYPE_NAMES
from aiotensor.tensors.placement import Placed
from aiotensor.tensors.source import Source, attributes_of

__all__ = ["Placement"]


class Placement:
    """The blocks of a message that is being published; this object is also the holder of their bytes."""

    def __init__(self) -> None:
        self.tensors: list[PlacedTensor] = []
        self.blocks: list[tuple[int, int]] = []  # the number and the size in bytes, once for each use
        self.segments: dict[int, None] = {}
        self.owned: set[int] = set()  # the blocks that were filled for this message

    def add(self, source: Source, placed: Placed, block: Block) -> None:
        """Add a tensor whose bytes are in a block."""
        self.use(block)
        self.tensors.append(
            PlacedTensor(
                DTYPE_NAMES[source.dtype],
                tuple(source.shape),
                placed.placement,
                placed.payload,
                block.number,
                attributes_of(source),
            )
        )

    def use(self, block: Block) -> None:
        """Add a block that the message uses."""
        self.blocks.append((block.number, block.place.nbytes))
        self.segments[block.place.segment.number] = None
