"""Two copies into warm memory, each by two threads."""

from bench.contenders.base import Layout
from bench.contenders.memcpy import CopySide, connect_with


def connect(layout: Layout) -> tuple[list[CopySide], CopySide]:
    return connect_with(2, layout)
