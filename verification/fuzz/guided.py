"""Run one target under atheris, which uses the coverage of an input to choose the next one.

`python -m verification.fuzz` runs each target in a separate process: libFuzzer ends its process at the end.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import atheris
import msgspec
import torch

with atheris.instrument_imports(include=["aiotensor"]):
    from verification.fuzz.broadcasts import any_content
    from verification.fuzz.choosers import FromBytes
    from verification.fuzz.decoding import (
        decode_both_ways,
        decode_content,
        decode_headers,
        decode_message,
        decode_moves,
    )
    from verification.fuzz.inside import Inside, inside
    from verification.fuzz.outcomes import Outcomes
    from verification.fuzz.targets import Progress, conversation_of, link_of
    from verification.places import endpoint

if TYPE_CHECKING:
    from verification.fuzz.engine import Figures

_WARM_UP = 200
_EVERY = 200


class _Growth:
    """A peer in this process, and whether it grows."""

    def __init__(self, target: str, runner: asyncio.Runner, one: Inside) -> None:
        self._target = target
        self._runner = runner
        self._one = one
        self._before: Figures | None = None

    def __call__(self, data: bytes, progress: Progress) -> None:
        self._runner.run(self._one.hear(conversation_of(self._target, data)))
        if progress.executions % _EVERY == 0:
            self._look(progress)

    def _look(self, progress: Progress) -> None:
        now = self._runner.run(self._one.look())
        progress.summary = self._one.summary
        if progress.executions < _WARM_UP:
            return
        # Memory is measured in the separate processes instead: here, libFuzzer itself takes more and more.
        grown = now.grown(self._before or now, slack_kib=1 << 30)
        self._before = self._before or now
        if grown:
            raise AssertionError(f"more is held than before: {grown}")


def _decode(data: bytes, progress: Progress) -> None:
    # The input itself, and records that are made of it.
    for to in ("decoder", "receiver", "sender", "inspector", "publisher", "subscriber", "rank"):
        for step in conversation_of(to, data).steps:
            decode_both_ways(step.data)
            for message in step.messages:
                decode_moves(message)
    decode_moves(data)
    Outcomes().add(conversation_of("rank", data))


def _decode_messages(data: bytes, progress: Progress) -> None:
    for step in conversation_of("messages", data).steps:
        decode_message([step.data, *map(bytes.fromhex, step.parts)])
    for to in ("decoder", "server", "client"):
        for step in conversation_of(to, data).steps:
            decode_headers(step.data)
    decode_content(data)
    decode_content(any_content(FromBytes(data)))


def _fuzz(hear: Callable[[bytes, Progress], None], progress_file: Path, arguments: list[str]) -> None:
    progress = Progress()
    written = 0.0

    def one(data: bytes) -> None:
        nonlocal written
        progress.executions += 1
        try:
            hear(data, progress)
        finally:
            if time.monotonic() - written > 0.5 or sys.exc_info()[0] is not None:
                written = time.monotonic()
                progress_file.write_bytes(msgspec.json.encode(progress))

    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


def main(target: str, progress_file: str, *arguments: str) -> None:
    """Fuzz one target with the options of libFuzzer, which include its duration."""
    torch.set_num_threads(1)
    progress = Path(progress_file)
    decoders = {"decoder": _decode, "messages": _decode_messages}
    if target in decoders:
        _fuzz(decoders[target], progress, list(arguments))
        return
    with endpoint(link_of(target)) as place, asyncio.Runner() as runner:
        opening = inside(target, place)
        _fuzz(_Growth(target, runner, runner.run(opening.__aenter__())), progress, list(arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
