"""A process that has no descriptors left: whoever waits is told."""

import pytest

from aiotensor import PeerLostError, TensorQueue, TensorReceiver, TensorSender
from tests.links.unix_ends import no_descriptors
from tests.pairs import pattern
from tests.processes import peers


async def test_nobody_waits_for_a_sender_whose_pipe_did_not_arrive() -> None:
    queue = TensorQueue()
    async with peers.peers(queue, 1) as [child]:
        reason, pid = await child.call(_receive_without_descriptors)
        assert "ulimit -n" in reason
        assert pid == child.pid
    queue.close()


async def _receive_without_descriptors(state: peers.State) -> tuple[str, int | None]:
    async with TensorReceiver(state.endpoint) as receiver, TensorSender(state.endpoint) as sender:
        with no_descriptors():  # the receiver has not looked at the queue yet
            handle = await sender.send(pattern(0, 3))
            with pytest.raises(PeerLostError) as caught:
                await receiver.receive(handle)
        with pytest.raises(PeerLostError):
            await sender.drain()
    return str(caught.value), caught.value.pid
