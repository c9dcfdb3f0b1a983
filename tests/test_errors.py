import copy
import errno
import inspect
import pickle

import pytest
import zmq

import aiotensor
from aiotensor import errors
from aiotensor.errors import AioTensorError
from aiotensor.types import Usage

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, BaseException) and kind.__module__ == errors.__name__
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_an_exported_and_documented_aiotensor_error(
    kind: type[Exception],
) -> None:
    assert issubclass(kind, AioTensorError)
    assert kind.__name__ in errors.__all__
    assert getattr(aiotensor, kind.__name__) is kind
    assert kind.__name__ in str(errors.__doc__)
    assert inspect.getdoc(kind)


CARRYING = [
    errors.PeerLostError("gone", pid=42),
    errors.WouldBlockError("full", messages=Usage(8, 8, 1), bytes=Usage(100, 90, 20)),
    errors.TooLargeError("large", limit=10, requested=20),
    errors.RemoteError("it raised", type_name="ValueError"),
]


@pytest.mark.parametrize("error", CARRYING, ids=lambda error: type(error).__name__)
def test_an_error_keeps_its_text_and_its_numbers_through_pickle_and_copy(error: AioTensorError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)


@pytest.mark.parametrize(
    ("kind", "builtin"), [(errors.UnsupportedTensorError, TypeError), (errors.UsageError, RuntimeError)]
)
def test_errors_of_the_caller_derive_from_built_in_exceptions(
    kind: type[Exception], builtin: type[Exception]
) -> None:
    with pytest.raises(builtin, match="a text"):
        raise kind("a text")


def test_a_shortage_of_resources_is_told_apart_from_other_errors() -> None:
    for shortage in (OSError(errno.EMFILE, ""), zmq.ZMQError(errno.EMFILE), MemoryError()):
        assert errors.is_shortage(shortage)
    for other in (FileNotFoundError(errno.ENOENT, ""), zmq.ZMQError(errno.EINVAL), OSError(), KeyError()):
        assert not errors.is_shortage(other)
