"""Values arrive bit for bit, or are refused before they use any resource."""

import array
from collections.abc import Callable

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from aiotensor import UnsupportedTensorError
from aiotensor.codec import TensorDecoder, TensorEncoder
from aiotensor.memory.tensors import DTYPES, new_tensor
from tests.pairs import pair
from verification.waiting import settled

pytestmark = [
    pytest.mark.usefixtures("nothing_left_behind"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

SMALL, LARGE = (3, 4), (300, 70)


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of random bits, including unusual NaNs (a bool has only two values)."""
    tensor = new_tensor(shape, dtype)
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (tensor.nbytes,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    as_bytes = [
        tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8) for tensor in (one, other)
    ]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*as_bytes)


@pytest.mark.promise(7)
@pytest.mark.usefixtures("link")
async def test_every_dtype_arrives_bit_for_bit() -> None:
    async with pair() as (sender, receiver):
        for name, dtype in DTYPES.items():
            for shape in (SMALL, LARGE, (0, 3), ()):
                source = random_bits(dtype, shape)
                handle = await sender.send(source)
                received = await receiver.receive(handle)
                assert handle.dtype == name
                assert type(received) is torch.Tensor
                assert same_bits(received, source), name


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
async def test_arrays_of_ml_dtypes_arrive_as_tensors(dtype: type[np.generic]) -> None:
    array = (np.arange(30_000) % 100).astype(dtype).reshape(300, 100)
    expected = torch.from_numpy(array.astype(np.float32))
    async with pair() as (sender, receiver):
        for view in (slice(None), slice(None, None, 3), slice(None, None, -1)):
            received = await receiver.receive(await sender.send(array[view]))
            assert str(received.dtype) == f"torch.{np.dtype(dtype).name}"
            assert torch.equal(received.float(), torch.from_numpy(expected.numpy()[view].copy()))
    decoded = TensorDecoder(list[torch.Tensor]).decode(TensorEncoder().encode([array]))
    assert torch.equal(decoded[0].float(), expected)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda tensor: tensor.t(),
    "every third row": lambda tensor: tensor[::3],
    "a column": lambda tensor: tensor[:, 1],
    "a slice": lambda tensor: tensor[1:3, 1:3],
    "expanded": lambda tensor: tensor[:1].expand(300, -1),
    "permuted": lambda tensor: tensor.reshape(2, -1, 2).permute(2, 0, 1),
    "overlapping": lambda tensor: tensor.reshape(-1).unfold(0, 5, 2),
    "channels last": lambda tensor: tensor.reshape(1, 2, -1, 2).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.promise(7)
@pytest.mark.parametrize("shape", [(6, 4), LARGE], ids=str)
async def test_views_of_any_strides_arrive_bit_for_bit(shape: tuple[int, ...]) -> None:
    async with pair() as (sender, receiver):
        for name, view in VIEWS.items():
            for dtype in (torch.uint8, torch.bfloat16, torch.complex64):
                source = view(random_bits(dtype, shape))
                assert same_bits(await receiver.receive(await sender.send(source)), source), name


DENSE: dict[str, Callable[[torch.Tensor], torch.Tensor | npt.NDArray[np.float32]]] = {
    **{name: VIEWS[name] for name in ("transposed", "permuted", "channels last")},
    "channels last, of one channel": lambda tensor: tensor.as_strided((3, 1, 4, 2), (8, 1, 2, 1)),
    "channels last, of one pixel": lambda tensor: tensor.as_strided((6, 4, 1, 1), (4, 1, 4, 4)),
    "a parameter": lambda tensor: torch.nn.Parameter(tensor.t()),
    "of dimensions of one element": lambda tensor: tensor.t()[:, None, :, None],
    "an array in the order of Fortran": lambda tensor: np.asfortranarray(tensor.numpy()),
}


@pytest.mark.parametrize("shape", [(6, 4), LARGE], ids=str)
@pytest.mark.usefixtures("link")
async def test_the_order_of_dense_tensors_in_memory_is_preserved(shape: tuple[int, ...]) -> None:
    async with pair() as (sender, receiver):
        for name, view in DENSE.items():
            source = view(torch.randn(shape))
            tensor = source if isinstance(source, torch.Tensor) else torch.from_numpy(source)
            for copy in (False, True):
                received = await receiver.receive(await sender.send(source), copy=copy)
                assert torch.equal(received, tensor), name
                assert received.stride() == tensor.stride(), name
                assert type(received) is type(tensor)
                assert received.requires_grad == tensor.requires_grad


async def test_numpy_arrays_and_dlpack_objects_are_sent_as_they_are() -> None:
    async with pair() as (sender, receiver):
        readonly = np.arange(50_000, dtype=np.uint16)
        readonly.flags.writeable = False
        for source in (
            readonly,
            readonly[::-1],
            np.asfortranarray(np.ones((3, 4))),
            np.array(3.0),
        ):
            received = await receiver.receive(await sender.send(source))
            assert np.array_equal(received.numpy(), source)

        class Exporter:
            def __init__(self) -> None:
                self.tensor = torch.arange(5)

            def __dlpack__(self, **options: object) -> object:
                return self.tensor.__dlpack__()

            def __dlpack_device__(self) -> tuple[int, int]:
                return (1, 0)

        assert torch.equal(await receiver.receive(await sender.send(Exporter())), torch.arange(5))
        with pytest.raises(TypeError):
            await sender.send(array.array("i", [1]))  # type: ignore[arg-type]


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a result of a computation with a gradient": (
        lambda: torch.ones(3, requires_grad=True) * 2,
        "detach",
    ),
    "a sparse tensor": (lambda: torch.ones(3).to_sparse(), "to_dense"),
    "a tensor of too many dimensions": (lambda: torch.zeros([1] * 65), "reshape"),
    "an empty tensor beyond all addresses": (lambda: torch.empty((0, 2**62), dtype=torch.float64), "smaller"),
    "a tensor without memory": (lambda: torch.empty(3, device="meta"), "cpu"),
    "an array of objects": (lambda: np.array([object()]), "dtype"),
    "an array of another byte order": (lambda: np.arange(3, dtype=">i4"), "newbyteorder"),
}


@pytest.mark.promise(7)
async def test_unsupported_values_are_refused_before_a_permit_is_acquired() -> None:
    async with pair(max_concurrent_videos=1) as (sender, receiver):
        held = await sender.send(torch.zeros(1))  # no permit is free: a refusal does not wait for one
        for make, remedy in REFUSED.values():
            with pytest.raises(UnsupportedTensorError, match=remedy):
                await sender.send(make())  # type: ignore[arg-type]
        await receiver.receive(held)
        await settled(sender)
        handle = await sender.send(torch.ones(2))  # the connection still works
        assert torch.equal(await receiver.receive(handle), torch.ones(2))
