import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiotensor.memory import copying
from aiotensor.memory.arena import Extent
from aiotensor.memory.copying import CopyAbandonedError, copy_in_threads, copy_now
from tests.memory.segments import MIB, arena_of, bytes_of, place_in, random_tensor, warm
from tests.selection import COMPLETE

GUARD = 64  # bytes behind a block that must stay as they are
Copy = Callable[[torch.Tensor, Extent], None]


@pytest.fixture(scope="module")
def helper() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def wanted() -> bool:
    return False


def copied(source: torch.Tensor, copy: Copy) -> bytes:
    """Copy a tensor into a block, check the memory around it, and return its bytes."""
    with arena_of(source.nbytes + 3 * GUARD) as arena:
        edge, place, other = (place_in(arena, nbytes) for nbytes in (GUARD, source.nbytes, GUARD))
        for guard in (edge, other):
            warm(guard).view()[:] = b"\xa5" * GUARD
        copy(source, warm(place))
        assert [bytes(guard.view()) for guard in (edge, other)] == [b"\xa5" * GUARD] * 2
        return bytes(place.view())


class Counting(Executor):
    """Run work in a thread, and count it."""

    def __init__(self, helper: Executor) -> None:
        self.helper = helper
        self.pieces = 0

    def submit(self, work, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.pieces += 1
        return self.helper.submit(work, *args, **kwargs)


@settings(max_examples=100 if COMPLETE else 30)
@given(nbytes=st.integers(1, 5000), step=st.integers(1, 600), is_large=st.booleans())
def test_a_contiguous_tensor_is_copied_whole_whatever_the_steps(
    helper: Executor, nbytes: int, step: int, is_large: bool
) -> None:
    source = random_tensor((nbytes,))
    counting = Counting(helper)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "_LONGEST_STEP_BYTES", step)
        patch.setattr(copying, "_SHORTEST_STEP_BYTES", step)
        patch.setattr(copying, "_SHARED_COPY_BYTES", nbytes if is_large else nbytes + 1)

        found = copied(source, lambda source, place: copy_in_threads(source, place, wanted, counting))

    assert found == bytes_of(source)
    assert counting.pieces == is_large


def test_a_copy_ends_only_when_the_helper_has_ended_its_part(helper: Executor) -> None:
    main = threading.get_ident()
    has_begun, is_awaited = threading.Event(), threading.Event()

    class Awaited(Executor):
        def submit(self, work, /, *args, **kwargs):  # type: ignore[no-untyped-def]
            running = helper.submit(work, *args, **kwargs)

            class Part(Future[None]):
                def result(self, timeout: float | None = None) -> None:
                    is_awaited.set()
                    running.result(10)

                def cancel(self) -> bool:
                    return running.cancel()

            return Part()

    def look() -> bool:
        if threading.get_ident() == main:
            assert has_begun.wait(10)
        else:
            has_begun.set()
            is_awaited.wait(1)
        return False

    source = random_tensor((4 * MIB,))

    assert copied(source, lambda s, place: copy_in_threads(s, place, look, Awaited())) == bytes_of(source)
    assert is_awaited.is_set()


def test_a_copy_gathered_in_several_boxes_is_complete(
    monkeypatch: pytest.MonkeyPatch, helper: Executor
) -> None:
    monkeypatch.setattr(copying, "_BOX_BYTES", 1000)
    numbers = torch.randn(123, 45, dtype=torch.complex64)
    for source in (numbers[:, :9].t(), numbers[::2, 1:], numbers.conj().t(), numbers.conj().imag):
        expected = source.resolve_conj().resolve_neg().contiguous().numpy().tobytes()
        for copy in (copy_now, lambda source, place: copy_in_threads(source, place, wanted, helper)):
            assert copied(source, copy) == expected


# Abandoned copies


class After:
    """Return True after a number of calls."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def __call__(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.mark.parametrize("is_contiguous", [True, False], ids=["contiguous", "gathered"])
def test_an_abandoned_copy_stops_between_two_steps(
    is_contiguous: bool, monkeypatch: pytest.MonkeyPatch, helper: Executor
) -> None:
    monkeypatch.setattr(copying, "_BOX_BYTES", 1000)
    monkeypatch.setattr(copying, "_LONGEST_STEP_BYTES", 1000)
    monkeypatch.setattr(copying, "_SHORTEST_STEP_BYTES", 1000)
    source = torch.full((100, 100), 7, dtype=torch.uint8)
    source = source if is_contiguous else torch.full((100, 200), 7, dtype=torch.uint8)[:, ::2]
    for looks in (0, 1, 5):
        with arena_of(20_000) as arena:
            place = warm(place_in(arena, source.nbytes))
            with pytest.raises(CopyAbandonedError):
                copy_in_threads(source, place, After(looks), helper)
            assert bytes(place.view()) == b"\7" * (1000 * looks) + bytes(10_000 - 1000 * looks)
            copy_in_threads(source, place, wanted, helper)
            assert bytes(place.view()) == b"\7" * 10_000, "it can be repeated"


def test_both_threads_stop_before_an_abandoned_copy_raises(helper: Executor) -> None:
    source = random_tensor((16 * MIB,))
    begun, is_abandoned = threading.Barrier(2), threading.Event()
    first: set[int] = set()
    looking: list[int] = []

    def look() -> bool:
        me = threading.get_ident()
        if me not in first:
            first.add(me)
            begun.wait(10)
            is_abandoned.set()
        looking.append(me)
        return is_abandoned.is_set()

    with arena_of(source.nbytes) as arena:
        place = warm(place_in(arena, source.nbytes))
        with pytest.raises(CopyAbandonedError):
            copy_in_threads(source, place, look, helper)

        assert len(first) == 2
        before = len(looking)
        helper.submit(int).result(10)  # nothing of the copy is left in its line
        assert len(looking) == before
        assert bytes(place.view()) == bytes(source.nbytes)


def test_a_copy_into_a_closed_segment_is_abandoned(helper: Executor) -> None:
    for source in (random_tensor((64,)), random_tensor((64, 2))[:, 0]):
        with arena_of(MIB) as arena:
            place = warm(place_in(arena, 64))
            place.segment.close()
            with pytest.raises(CopyAbandonedError):
                copy_now(source, place)
            with pytest.raises(CopyAbandonedError):
                copy_in_threads(source, place, wanted, helper)
