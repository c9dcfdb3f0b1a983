"""A rank without memory for the tensors that arrive."""

import errno

import pytest
import torch

from aiotensor import PeerLostError
from aiotensor.ranks import incoming
from tests.ranks.pipes import ends


@pytest.mark.parametrize("route", ["tcp", "encrypted"], indirect=True)
@pytest.mark.usefixtures("route")
async def test_a_rank_without_memory_for_a_tensor_closes_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    async with ends() as (low, high):
        monkeypatch.setattr(incoming, "open_out_of_band", refuse)
        low.send_nowait(torch.ones(5_000))
        reason = "no memory is left in this process for its tensors: .*Cannot allocate memory"
        with pytest.raises(PeerLostError, match=f"this rank cannot use the peer .*{reason}"):
            await high.receive()
        with pytest.raises(PeerLostError, match=reason):
            await low.drain()
