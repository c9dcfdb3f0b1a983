"""The table of workloads: name to module. A module has the coroutines `near` and `far`."""

__all__ = ["WORKLOADS"]

WORKLOADS = {"round-trip": "bench.workloads.round_trip"}
