"""The state machines, one for each combination of link and event loop."""

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import invariant, rule

from verification.internals import memory_of, permits_of
from verification.model.broadcast import WholeBroadcast
from verification.model.settled import SettledWorld
from verification.model.stage import Stage

SETTINGS = settings(
    stateful_step_count=45,
    deadline=None,
    database=None,  # a run depends on nothing but its seed
    derandomize=False,
    print_blob=False,
    report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


class WholeProtocol(SettledWorld):
    """Add the invariants that hold after every step, whatever is in transit."""

    @rule()
    def settle_and_compare(self) -> None:
        self.settle()

    @invariant()
    def no_bound_is_exceeded_and_nobody_is_overtaken(self) -> None:
        for sender in self.senders:
            now = sender.sender.statistics()
            assert now.in_flight <= now.peak_in_flight <= now.max_concurrent_videos == sender.limit
            assert now.bytes_in_use <= now.peak_bytes_in_use <= now.arena_bytes == sender.arena_bytes
        for sender in self.living:
            permits = permits_of(sender.sender)
            assert not permits.waiting or permits.in_use == permits.limit, "a permit is free, and one waits"
            begun = [m for m in sender.messages if m.opened is not None or m.number is not None]
            latest = max((m.began for m in begun if m.waits_in_line), default=0)
            later = [call for call in self.of(sender, "send", "message") if call.begun.began > latest]
            assert permits.waiting <= len(later), "a later call got a permit first"
            later = [call for call in self.of(sender, "allocate") if call.began > sender.latest_allocation]
            later += self.of(sender, "send", "send in a message")
            waiting = memory_of(sender.sender).gate.waiting
            assert waiting <= len(later), "a later call got memory first"
        for receiver in self.receivers:
            here = receiver.receiver.statistics()
            limit = here.max_unclaimed_messages
            assert limit is None or here.promised_messages <= limit
            assert here.leased_bytes <= here.peak_leased_bytes


def _machine(base: type[Stage], link: str, loop: str, **more: object) -> type[Stage]:
    return type(base.__name__, (base,), {"link": link, "loop": loop, **more})


MACHINES = {
    f"{link}, {loop}": _machine(WholeProtocol, link, loop)
    for loop in ("asyncio", "uvloop")
    for link in ("queue", "unix")
} | {
    f"{size} subscribers, {link}, {loop}": _machine(WholeBroadcast, link, loop, size=size)
    for size in (1, 2, 4, 8)
    for link, loop in [("queue", "uvloop"), ("unix", "asyncio")][:: 1 if size % 4 else -1]
}
