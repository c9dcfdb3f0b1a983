"""Two engines of NIXL in one process."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from aiotensor.engines import Engine, EngineError, engine_maker

LARGE = 8 << 20


@pytest.fixture
def engines() -> Iterator[tuple[Engine, Engine]]:
    """Make two engines that know each other."""
    make = engine_maker("nixl")
    with ExitStack() as closing:
        one = make()
        closing.callback(one.close)
        other = make()
        closing.callback(other.close)
        one.connect(other.address)
        other.connect(one.address)
        yield one, other


def end_of(write: object, writer: Engine, reader: Engine) -> str:
    """Poll both until a write has ended, and return its error."""
    while True:
        for ended, reason in writer.poll():
            assert ended == write
            return reason
        reader.poll()


def test_a_write_changes_its_range_only(engines: tuple[Engine, Engine]) -> None:
    writer, reader = engines
    memory = bytearray(b"." * 30)
    key = reader.register(memoryview(memory))

    assert end_of(writer.write(memoryview(b"0123456789"), key, 7), writer, reader) == ""

    assert bytes(memory) == b"." * 7 + b"0123456789" + b"." * 13


def test_both_engines_write(engines: tuple[Engine, Engine]) -> None:
    memories = [bytearray(LARGE), bytearray(LARGE)]
    keys = [engine.register(memoryview(memory)) for engine, memory in zip(engines, memories, strict=True)]
    for index, content in enumerate((b"a", b"b")):
        writer, reader = engines[index], engines[1 - index]
        source = memoryview(content * LARGE)
        assert end_of(writer.write(source, keys[1 - index], 0), writer, reader) == ""
    assert [bytes(memory[:: LARGE - 1]) for memory in memories] == [b"bb", b"aa"]


def test_memory_that_is_registered_again_has_a_new_key(engines: tuple[Engine, Engine]) -> None:
    writer, reader = engines
    memory = bytearray(10)
    for number in range(5000):  # more than the metadata that a writer keeps
        key = reader.register(memoryview(memory))
        content = number.to_bytes(10)
        assert end_of(writer.write(memoryview(content), key, 0), writer, reader) == ""
        assert bytes(memory) == content
        reader.unregister(key)


def test_bytes_that_exceed_the_memory_are_not_written(engines: tuple[Engine, Engine]) -> None:
    writer, reader = engines
    memory = bytearray(10)
    key = reader.register(memoryview(memory))

    with pytest.raises(EngineError, match="exceed"):
        writer.write(memoryview(b"0123456789"), key, 1)

    assert bytes(memory) == bytes(10)


@pytest.mark.parametrize("key", [b"", b"short", bytes(24), bytes(300)])
def test_an_invalid_key_is_an_error(engines: tuple[Engine, Engine], key: bytes) -> None:
    with pytest.raises(EngineError):
        engines[0].write(memoryview(b""), key, 0)


@pytest.mark.parametrize("address", [b"", b"nothing", bytes(300)])
def test_an_invalid_address_is_an_error(address: bytes) -> None:
    engine = engine_maker("nixl")()
    try:
        with pytest.raises(EngineError, match="unusable"):
            engine.connect(address)
    finally:
        engine.close()


def test_the_key_of_a_third_engine_is_an_error(engines: tuple[Engine, Engine]) -> None:
    third = engine_maker("nixl")()
    try:
        key = third.register(memoryview(bytearray(10)))
        with pytest.raises(EngineError):
            engines[0].write(memoryview(bytes(10)), key, 0)
    finally:
        third.close()


def test_a_write_to_a_closed_engine_is_an_error() -> None:
    peer = engine_maker("nixl")()
    other = engine_maker("nixl")()
    memory = bytearray(LARGE)
    try:
        other.connect(peer.address)
        peer.connect(other.address)
        key = peer.register(memoryview(memory))
        assert end_of(other.write(memoryview(bytes(10)), key, 0), other, peer) == ""
        peer.close()
        with pytest.raises(EngineError):
            other.write(memoryview(b"x" * LARGE), key, 0)
        assert bytes(memory) == bytes(LARGE)
    finally:
        other.close()


def test_an_unknown_engine_is_an_error() -> None:
    with pytest.raises(EngineError, match="unknown engine 'rdma'"):
        engine_maker("rdma")


def test_an_engine_needs_descriptors(engines: tuple[Engine, Engine]) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, before[1]))
    try:
        with pytest.raises(EngineError, match="ulimit -n"):
            engine_maker("nixl")()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def run(program: str) -> str:
    """Run a program in a new process, and return its output."""
    return subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    ).stdout


def test_loading_changes_neither_the_environment_nor_logging_nor_signal_handlers() -> None:
    output = run(
        "import logging, os, signal, torch\n"  # torch itself changes the environment
        "from aiotensor.engines import engine_maker\n"
        "def state():\n"
        "    handlers = [line for line in open('/proc/self/status') if line.startswith('Sig')]\n"
        "    return dict(os.environ), logging.raiseExceptions, logging.root.handlers, handlers\n"
        "before = state()\n"
        "engine = engine_maker('nixl')()\n"
        "assert state() == before, state()\n"
        "engine.close()\n"
        "print('the same')\n"
    )
    assert output == "the same\n"


@pytest.mark.parametrize("first", ["aiotensor", "nixl_cu12"])
def test_the_application_may_use_nixl_itself(first: str) -> None:
    lines = {
        "aiotensor": "from aiotensor.engines import engine_maker; engine_maker('nixl')().close()",
        "nixl_cu12": "import nixl_cu12; nixl_cu12.nixl_agent('x', nixl_cu12.nixl_agent_config(backends=[]))",
    }
    second = next(name for name in lines if name != first)
    assert run(f"{lines[first]}\n{lines[second]}\nprint('both')\n").endswith("both\n")


def test_a_package_that_is_not_installed_is_an_error() -> None:
    output = run(
        "import sys\n"
        "sys.modules['nixl_cu12'] = sys.modules['nixl_cu13'] = None\n"
        "from aiotensor.engines import EngineError, engine_maker\n"
        "try:\n"
        "    engine_maker('nixl')\n"
        "except EngineError as error:\n"
        "    print(error)\n"
    )
    assert output == "NIXL is not installed: pip install nixl-cu12\n"


def test_a_forked_child_does_not_end_the_connections_of_its_parent(engines: tuple[Engine, Engine]) -> None:
    writer, reader = engines
    memory = bytearray(LARGE)
    key = reader.register(memoryview(memory))
    assert end_of(writer.write(memoryview(b"a" * LARGE), key, 0), writer, reader) == ""
    child = os.fork()
    if child == 0:
        writer.close()
        reader.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert end_of(writer.write(memoryview(b"b" * LARGE), key, 0), writer, reader) == ""
    assert bytes(memory[:: LARGE - 1]) == b"bb"


def test_nothing_is_logged(engines: tuple[Engine, Engine], capfd: pytest.CaptureFixture[str]) -> None:
    writer, reader = engines
    key = reader.register(memoryview(bytearray(LARGE)))
    end_of(writer.write(memoryview(bytes(LARGE)), key, 0), writer, reader)
    with pytest.raises(EngineError):
        writer.write(memoryview(b"x"), bytes(300), 0)
    assert capfd.readouterr() == ("", "")
    assert logging.root.level == logging.WARNING
