"""Work through many video files, without a server: some at a time, each as large as it likes.

python examples/engine.py &
python examples/batch_client.py one.mp4 two.mp4 ...

It needs `pip install aiotensor av`.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
from messages import MESSAGES, TENSORS, Summary
from videos import UnreadableVideoError, Upload, colours

from aiotensor import AioTensorError, TensorSender
from aiotensor.channel import MessageClient

FILES_AT_ONCE = 4
PIECE_BYTES = 1 << 20


async def pieces(path: Path) -> AsyncIterator[bytes]:
    """Read a file piece by piece."""
    async with await anyio.open_file(path, "rb") as file:
        while piece := await file.read(PIECE_BYTES):
            yield piece


async def main(paths: list[Path]) -> int:
    """Print a line for each file, and return how many could not be done."""
    failed = 0
    turns = asyncio.Semaphore(FILES_AT_ONCE)
    async with (
        TensorSender(TENSORS, max_concurrent_videos=FILES_AT_ONCE) as sender,
        MessageClient(MESSAGES, sender=sender, reply_type=Summary) as client,
    ):

        async def work(path: Path) -> None:
            nonlocal failed
            async with turns:
                try:
                    upload = Upload(pieces(path), (await anyio.Path(path).stat()).st_size)
                    found = await colours(upload, sender, client)
                except (UnreadableVideoError, AioTensorError, OSError) as error:
                    failed += 1
                    print(f"{path.name}: {error}", file=sys.stderr)
                else:
                    red, green, blue = (sum(channel) / len(found) for channel in zip(*found, strict=True))
                    print(f"{path.name}: {len(found)} frames, mean colour {red:.0f} {green:.0f} {blue:.0f}")

        async with asyncio.TaskGroup() as group:
            for path in paths:
                group.create_task(work(path))
    return failed


if __name__ == "__main__":
    raise SystemExit(min(asyncio.run(main([Path(name) for name in sys.argv[1:]])), 1))
