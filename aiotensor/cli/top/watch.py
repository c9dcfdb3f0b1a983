"""Looking again and again, and drawing what was found. Needs rich."""

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
    """Look at a receiver until this is cancelled, and at the next one once it is gone.

    SIGTERM cancels it: what ends the process at once would leave the terminal as it was drawn on.

    Raises:
        AioTensorError: there can be none that this process may look at.
    """
    watching = asyncio.current_task()
    if watching is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, watching.cancel)
    console = Console()
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
