"""A tensor that cannot be sent is refused as such, also in a message that contains its tensors."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aiotensor import UnsupportedTensorError
from aiotensor.channel import MessageClient, MessageServer
from tests.channel.parties import place

pytestmark = [
    pytest.mark.usefixtures("nothing_left_behind"),
    pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse BS[RC] tensor support is in beta:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantize:UserWarning", "ignore:.*quantize:DeprecationWarning"),
]


class Subclass(torch.Tensor):
    """A subclass that the other side does not know."""


def freed() -> torch.Tensor:
    tensor = torch.zeros(3, 3).t()
    tensor.untyped_storage().resize_(0)
    return tensor


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)


UNSUPPORTED: dict[str, Callable[[], torch.Tensor]] = {
    "sparse COO": lambda: torch.eye(4).to_sparse(),
    "sparse CSR": lambda: torch.eye(4).to_sparse_csr(),
    "sparse CSC": lambda: torch.eye(4).to_sparse_csc(),
    "sparse BSR": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "sparse BSC": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "sparse CSR on meta": lambda: torch.eye(4).to_sparse_csr().to("meta"),
    "large sparse COO": lambda: torch.eye(2000).to_sparse(),
    "nested": lambda: nested(torch.strided),
    "nested, jagged": lambda: nested(torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.quint8),
    "meta": lambda: torch.empty(2000, 2000, device="meta").t(),
    "without memory": freed,
    "a zero tensor": lambda: torch._efficientzerotensor((3, 3)),
    "a subclass": lambda: torch.zeros(3).as_subclass(Subclass),
    "a gradient history": lambda: torch.zeros(3, 3, requires_grad=True).t(),
}


@pytest.mark.parametrize("make", UNSUPPORTED.values(), ids=UNSUPPORTED)
async def test_an_unsupported_tensor_is_refused_in_a_request_and_in_a_reply(
    make: Callable[[], torch.Tensor],
) -> None:
    with place() as here:
        async with (
            MessageServer(here.messages, dict[str, Any]) as server,
            MessageClient(here.messages, reply_type=dict[str, Any]) as client,
        ):
            with pytest.raises(UnsupportedTensorError):
                await client.request({"tensor": make()})
            asking = asyncio.create_task(client.request({}))
            async with await anext(server) as request:
                with pytest.raises(UnsupportedTensorError):
                    await request.reply({"tensor": make()})
                await request.reply({})
            assert await asking == {}
