"""Looking again and again, and drawing what was found. Needs rich."""

import asyncio
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

    Raises:
        AioTensorError: there can be none that this process may look at.
    """
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
