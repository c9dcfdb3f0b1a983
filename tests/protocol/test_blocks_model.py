import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiotensor.protocol.blocks import Blocks

MIB = 1 << 20
few_units = st.integers(64, 24 * 64)
few_large = st.integers(3 * MIB, 8 * MIB)
smalls = st.integers(1, 5 * 64)
larges = st.one_of(st.sampled_from([MIB - 64, MIB - 63, MIB, 2 * MIB]), st.integers(MIB // 2, 3 * MIB))


class BlocksMachine(RuleBasedStateMachine):
    """Keep nothing but the blocks that are handed out, and look through all the gaps between them."""

    @initialize(size=st.one_of(few_units, few_large))
    def begin(self, size: int) -> None:
        self.blocks = Blocks(size)
        self.size = size // 64 * 64
        self.taken: dict[int, int] = {}  # rounded lengths by offset

    # The model

    def gaps(self) -> list[tuple[int, int]]:
        edges = [
            0,
            *(edge for offset in sorted(self.taken) for edge in (offset, offset + self.taken[offset])),
        ]
        pairs = zip(edges[::2], [*edges[1::2], self.size], strict=True)
        return [(start, stop) for start, stop in pairs if start != stop]

    def best_fit(self, length: int) -> int | None:
        best: tuple[int, int] | None = None
        for start, stop in self.gaps():
            if stop - start >= length and (best is None or stop - start < best[1] - best[0]):
                best = (start, stop)
        if best is None:
            return None
        return best[0] if length >= MIB else best[1] - length

    # What callers do

    def check_allocate(self, nbytes: int) -> None:
        length = nbytes + -nbytes % 64
        expected = self.best_fit(length)
        assert self.blocks.allocate(nbytes) == expected
        if expected is not None:
            self.taken[expected] = length

    @rule(nbytes=smalls)
    def allocate_small(self, nbytes: int) -> None:
        self.check_allocate(nbytes)

    @rule(nbytes=larges)
    def allocate_large(self, nbytes: int) -> None:
        self.check_allocate(nbytes)

    @rule(nbytes=st.integers(-64, 0))
    def allocate_nothing(self, nbytes: int) -> None:
        with pytest.raises(ValueError, match=f"at least 1 byte, got {nbytes}"):
            self.blocks.allocate(nbytes)

    @rule(nbytes=smalls, count=st.integers(2, 8))
    def allocate_several(self, nbytes: int, count: int) -> None:
        for _ in range(count):
            self.check_allocate(nbytes)

    @precondition(lambda self: self.gaps())
    @rule(data=st.data(), more=st.integers(-64, 64))
    def allocate_what_fits_a_gap(self, data: st.DataObject, more: int) -> None:
        start, stop = data.draw(st.sampled_from(self.gaps()))
        self.check_allocate(max(1, stop - start + more))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.taken)))
        self.blocks.free(offset)
        del self.taken[offset]

    @precondition(lambda self: self.taken)
    @rule(keep=st.integers(0, 1))
    def free_every_other(self, keep: int) -> None:
        for offset in sorted(self.taken)[keep::2]:
            self.blocks.free(offset)
            del self.taken[offset]

    @rule(units=st.integers(-2, 26))
    def free_what_may_not_be_there(self, units: int) -> None:
        if units * 64 in self.taken:
            self.blocks.free(units * 64)
            del self.taken[units * 64]
            return
        with pytest.raises(ValueError, match="no block is allocated"):
            self.blocks.free(units * 64)

    # Invariants

    @invariant()
    def runs_and_blocks_tile_the_room(self) -> None:
        blocks = [(offset, offset + self.blocks.lengths[offset]) for offset in self.taken]
        tiles = sorted([*blocks, *self.blocks.free_runs()])
        assert [start for start, _ in tiles] == [0, *(stop for _, stop in tiles[:-1])]
        assert tiles[-1][1] == self.size == self.blocks.size

    @invariant()
    def the_free_runs_are_the_gaps(self) -> None:
        assert self.blocks.free_runs() == self.gaps()
        assert self.blocks.largest_free == max((stop - start for start, stop in self.gaps()), default=0)

    @invariant()
    def lengths_are_what_was_asked_for(self) -> None:
        assert {offset: self.blocks.lengths[offset] for offset in self.taken} == self.taken
        assert self.blocks.in_use == sum(self.taken.values())


TestAnyOrderOfBlocks = BlocksMachine.TestCase
TestAnyOrderOfBlocks.settings = settings(max_examples=150, stateful_step_count=40)
