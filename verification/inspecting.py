"""Inspections of receivers."""

from aiotensor.inspection import Inspection, inspect


async def inspect_receiver(address: str, *, patience_s: float) -> Inspection:
    """Inspect a receiver, as `inspect` does; fail if the object at the address is a publisher."""
    inspection = await inspect(address, patience_s=patience_s)
    assert inspection.kind == "receiver"
    return inspection
