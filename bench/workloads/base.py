"""What a workload is given beside its ports."""

import asyncio
import socket

__all__ = ["Barrier"]


class Barrier:
    """Where the two processes of a pair wait for each other between batches, never within one."""

    def __init__(self, road: socket.socket) -> None:
        self._road = road
        road.setblocking(False)

    async def meet(self) -> None:
        """Wait until the other process is here too."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._road, b".")
        if not await loop.sock_recv(self._road, 1):
            raise ConnectionError("the other process of the pair is gone")
