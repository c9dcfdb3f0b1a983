"""Process many video files of any size without a server, a few at a time.

python examples/engine.py &
python examples/batch_client.py one.mp4 two.mp4 ...

It needs `pip install aiotensor av`.
"""

import asyncio
import io
import sys
from pathlib import Path

from addresses import ENGINE, keys_of
from aiotensor import AioTensorError, MessageClient
from messages import Summary
from two_hosts.keys import ApiKeys
from videos import UnreadableVideoError, colours

FILES_AT_ONCE = 4


class LocalFile(io.FileIO):
    """A file that is complete, so reading it does not wait."""

    failure: Exception | None = None

    def give_up(self) -> None:
        """Do nothing."""


async def main(paths: list[Path]) -> int:
    """Print a line for each file, and return the number of files that failed."""
    failed = 0
    admission = asyncio.Semaphore(FILES_AT_ONCE)
    async with MessageClient(ENGINE, Summary, FILES_AT_ONCE, **keys_of(ApiKeys)) as client:

        async def process(path: Path) -> None:
            nonlocal failed
            async with admission:
                try:
                    found = await colours(LocalFile(path), client)
                except (UnreadableVideoError, AioTensorError, OSError) as error:
                    failed += 1
                    print(f"{path.name}: {error}", file=sys.stderr)
                else:
                    red, green, blue = (sum(channel) / len(found) for channel in zip(*found, strict=True))
                    print(f"{path.name}: {len(found)} frames, mean colour {red:.0f} {green:.0f} {blue:.0f}")

        async with asyncio.TaskGroup() as group:
            for path in paths:
                group.create_task(process(path))
    return failed


if __name__ == "__main__":
    raise SystemExit(min(asyncio.run(main([Path(name) for name in sys.argv[1:]])), 1))
