"""Inspect a receiver repeatedly and draw the results on a terminal. Needs rich."""

import asyncio
import signal
from typing import NoReturn

from rich.console import Console
from rich.live import Live

from aiotensor.cli.top.rates import rates
from aiotensor.cli.top.view import as_screen, nobody
from aiotensor.errors import PeerLostError
from aiotensor.inspection import Inspection, inspect

__all__ = ["watch"]


async def watch(address: str, interval_s: float, patience_s: float) -> NoReturn:
    """Inspect a receiver until cancelled, and its successor after it is gone.

    SIGTERM cancels this coroutine, so that the terminal is restored before the process ends.

    Args:
        address: of the receiver.
        interval_s: pause in seconds between two inspections.
        patience_s: seconds to wait in each inspection for a receiver or a sender that does not answer.

    Raises:
        AioTensorError: this process cannot inspect any receiver at this address.
    """
    watching = asyncio.current_task()
    if watching is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, watching.cancel)
    # By default rich checks for a terminal before it draws: without one, this would loop and draw nothing.
    console = Console(force_terminal=True)
    before: Inspection | None = None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                now = await inspect(address, patience_s=patience_s)
            except PeerLostError as error:
                before = None
                live.update(nobody(str(error)), refresh=True)
            else:
                live.update(as_screen(address, now, rates(before, now), console.height), refresh=True)
                before = now
            await asyncio.sleep(interval_s)
