"""A sample of the public API, which mypy checks and no test runs."""

import multiprocessing.queues
from collections.abc import Sequence
from typing import assert_never, assert_type

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.multiprocessing.queue

import aiotensor
from aiotensor import (
    AioTensorError,
    Delivery,
    Holder,
    OpenMessage,
    ReceiverStatistics,
    SenderStatistics,
    TensorHandle,
    TensorQueue,
    TensorReceiver,
    TensorSender,
    Usage,
    Waits,
)


class Box:
    """Something of another library that shares its memory."""

    def __dlpack__(self, *, stream: object = None) -> object:
        return None

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


async def send_one(queue: TensorQueue, tensor: torch.Tensor, array: npt.NDArray[np.uint8], box: Box) -> None:
    async with TensorSender(queue, max_concurrent_videos=8, arena_bytes=1 << 30) as sender:
        assert_type(sender, TensorSender)
        assert_type(sender.id, str)
        assert_type(await sender.send(tensor), TensorHandle)
        assert_type(await sender.send(array), TensorHandle)
        assert_type(await sender.send(box), TensorHandle)
        assert_type(await sender.send(torch.nn.Parameter(tensor)), TensorHandle)
        assert_type(sender.send_nowait(tensor), TensorHandle)
        assert_type(handle := sender.post(box), TensorHandle)
        assert_type(await sender.copied(handle), None)
        await sender.ready()
        await sender.ready(nbytes=1 << 20)
        await sender.send([tensor])  # type: ignore[arg-type]
        await sender.send(b"bytes")  # type: ignore[arg-type]
        await sender.send(None)  # type: ignore[arg-type]


async def send_over_a_stock_queue(
    queue: "torch.multiprocessing.queue.Queue", plain: "multiprocessing.queues.Queue[object]"
) -> None:
    async with TensorSender(queue), TensorReceiver(plain):
        pass


async def meet_at_an_address(address: str) -> None:
    async with (
        TensorReceiver(
            address,
            max_senders=4,
            max_mapped_bytes=None,
            max_unclaimed_messages=None,
            max_frame_bytes=1 << 15,
            max_wait_s=2.5,
        ) as receiver,
        TensorSender(address, keep_warm_s=None, long_wait_s=2.5) as sender,
    ):
        assert_type(receiver, TensorReceiver)
        assert_type(sender, TensorSender)
    TensorReceiver("unix:///run/user/1000/engine.sock", max_senders=None)
    TensorSender("unix:///run/user/1000/engine.sock", 8, 1 << 30)

    TensorSender(address, 8, 1 << 30, 30.0)  # type: ignore[call-arg]
    TensorSender(address, keep_warm_s="30")  # type: ignore[arg-type]
    TensorReceiver(address, 4)  # type: ignore[call-arg]
    TensorReceiver(address, max_frame_bytes=None)  # type: ignore[arg-type]
    TensorReceiver(address, max_wait_s="5")  # type: ignore[arg-type]
    TensorReceiver(b"unix:///run/user/1000/engine.sock")  # type: ignore[arg-type]


async def send_several(sender: TensorSender, tensors: Sequence[torch.Tensor]) -> list[TensorHandle]:
    async with sender.message() as message:
        assert_type(message, OpenMessage)
        assert_type(await message.allocate((2, 3), torch.float32), torch.Tensor)
        return [await message.send(tensor) for tensor in tensors]


async def send_without_a_copy(sender: TensorSender) -> None:
    frames = await sender.allocate((120, 720, 1280, 3), torch.uint8)
    assert_type(frames, torch.Tensor)
    handle = await sender.send(frames)
    sender.discard(handle)
    assert_type(sender.discard_all(), int)
    await sender.drain()

    await sender.allocate([2, 3], dtype=torch.float32)
    await sender.allocate((2, 3), np.uint8)  # type: ignore[arg-type]


async def receive(queue: TensorQueue, handle: TensorHandle) -> None:
    async with TensorReceiver(queue) as receiver:
        assert_type(receiver, TensorReceiver)
        assert_type(await receiver.receive(handle), torch.Tensor)
        assert_type(await receiver.receive(handle, copy=True), torch.Tensor)
        assert_type(receiver.receive_nowait(handle), torch.Tensor)
        async for delivery in receiver:
            assert_type(delivery, Delivery)
            assert_type(delivery.handle, TensorHandle)
            assert_type(delivery.tensor, torch.Tensor)
            assert_type(delivery.tensors, int)
        receiver.discard(handle)

        await receiver.receive(handle, True)  # type: ignore[call-arg]
        await receiver.receive("a name")  # type: ignore[arg-type]


async def open_and_close_by_hand(queue: TensorQueue) -> None:
    sender = TensorSender(queue)
    receiver = TensorReceiver(queue)
    await sender.aclose()
    await receiver.aclose()
    queue.close()

    TensorSender(42)  # type: ignore[arg-type]
    TensorSender(queue, max_concurrent_videos="8")  # type: ignore[arg-type]
    TensorSender()  # type: ignore[call-arg]


def look_at_a_handle(handle: TensorHandle) -> bytes:
    assert_type(handle.sender, str)
    assert_type(handle.message, int)
    assert_type(handle.tensor, int)
    assert_type(handle.dtype, str)
    assert_type(handle.shape, tuple[int, ...])
    assert_type(handle.device, str)
    hash(handle)
    assert_type(dict(handle), dict[str, str | int | tuple[int, ...]])
    again = msgspec.json.decode(msgspec.json.encode(handle), type=TensorHandle)
    assert_type(again, TensorHandle)

    handle.message = 3  # type: ignore[misc]
    return msgspec.msgpack.encode(handle)


def look_at_numbers(sender: TensorSender, receiver: TensorReceiver) -> tuple[int, int]:
    sent = sender.statistics()
    received = receiver.statistics()
    assert_type(sent, SenderStatistics)
    assert_type(received, ReceiverStatistics)
    assert_type(sent.longest_wait_s, float)
    assert_type(sent.holders, tuple[Holder, ...])
    assert_type(sent.receivers_lost + sent.warm_bytes, int)
    assert_type(sent.permit_waits, Waits)
    assert_type(sent.memory_waits.bounds_s, tuple[float, ...])
    assert_type(sent.memory_waits.counts, tuple[int, ...])
    assert_type(sent.memory_waits.total_s, float)
    assert_type(
        sent.tensors_copied + sent.bytes_copied + received.tensors_copied + received.bytes_copied, int
    )
    assert_type(sent.errors, dict[str, int])
    assert_type(received.errors, dict[str, int])
    assert_type(received.max_senders, int | None)
    assert_type(received.mapped_bytes + received.promised_messages + received.senders_refused, int)
    sent.in_flight = 0  # type: ignore[misc]
    return sent.peak_in_flight + sent.waiting, received.leased_bytes


def say_who_holds_it(holder: Holder) -> str:
    assert_type(holder.message, int | None)
    assert_type(holder.bytes, int)
    assert_type(holder.seconds, float)
    holder.bytes = 0  # type: ignore[misc]
    return holder.state


async def tell_errors_apart(receiver: TensorReceiver, sender: TensorSender, handle: TensorHandle) -> str:
    try:
        sender.send_nowait(await receiver.receive(handle))
    except aiotensor.ClosedError:
        return "you closed it"
    except aiotensor.PeerLostError as error:
        assert_type(error.pid, int | None)
        return "it died"
    except aiotensor.RefusedError as error:
        assert_type(error.pid, int | None)
        return "500: a limit or a version has to be changed"
    except (aiotensor.DiscardedError, aiotensor.AlreadyTakenError):
        return "gone"
    except aiotensor.WouldBlockError as error:
        assert_type(error.messages, Usage)
        assert_type(error.bytes.limit, int | None)
        assert_type(error.bytes.in_use, int)
        return "503"
    except aiotensor.TooLargeError as error:
        assert_type(error.limit, int)
        return f"413: at most {error.limit} bytes, not {error.requested}"
    except aiotensor.UnsupportedTensorError as error:
        mistake: TypeError = error
        return str(mistake)
    except aiotensor.UsageError as error:
        wrong_place: RuntimeError = error
        return str(wrong_place)
    except AioTensorError:
        return "something else of aiotensor's own"
    return "sent on"


def remote_errors_have_a_type(error: aiotensor.RemoteError | aiotensor.AccessDeniedError) -> str:
    match error:
        case aiotensor.RemoteError():
            return error.type_name
        case aiotensor.AccessDeniedError():
            return "another user"
        case _:
            assert_never(error)
