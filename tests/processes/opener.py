"""A program that opens a listening object for a moment: python -m tests.processes.opener unix:///..."""

import asyncio
import sys
from typing import Any

from aiotensor import TensorReceiver
from aiotensor.channel import MessageServer


async def _open(address: str, timeout_s: float) -> str:
    listener: Any = TensorReceiver(address) if address.startswith("unix:") else MessageServer(address, int)
    try:
        async with asyncio.timeout(timeout_s):
            await listener.__aenter__()
    except TimeoutError:
        return "timed out"
    await listener.aclose()
    return "opened"


if __name__ == "__main__":
    print(asyncio.run(_open(sys.argv[1], float(sys.argv[2]))), flush=True)
