"""The example for two machines runs as its first comment shows, and so do the programs of its guide."""

import asyncio
import re
import signal
import stat
import sys
from pathlib import Path

import pytest

from tests.examples.programs import ROOT, Program, running, shown
from two_hosts import keys
from verification.places import free_port

MAKE_KEYS, ENGINE, API = shown("two_hosts/__init__")
GUIDE = (ROOT / "docs" / "two-machines.md").read_text()
ENVIRONMENT = {"PYTHONPATH": str(ROOT / "examples"), "PYTHONWARNINGS": "error"}


@pytest.fixture
def port() -> int:
    """Return the first of two free ports."""
    first, second = free_port(), free_port()
    while second != first + 1:
        first, second = second, free_port()
    return first


def at(folder: Path, command: list[str], *more: object) -> list[str]:
    """Return a command with its key files in a folder, and with further arguments."""
    words = [word.replace("two_hosts/keys", f"{folder}/keys") for word in command]
    return [*words, *map(str, more)]


def answers(output: str) -> set[str]:
    """Return the answers in the output of the API server."""
    return set(output.splitlines())


def expected(videos: int) -> set[str]:
    """Return the answers for the first videos, whose frames become brighter by 1 from frame to frame."""
    return {f"video {number}: 60 frames, brightness {number + 29.5:.1f}" for number in range(videos)}


async def result(program: Program) -> tuple[int | None, str, str]:
    """Wait for the end of a program, and return its exit status, its output and its errors."""
    output, errors = await program.process.communicate()
    return program.process.returncode, output.decode(), errors.decode()


async def test_the_api_server_gets_an_answer_for_each_video(folder: Path, port: int) -> None:
    async with running(at(folder, MAKE_KEYS), folder, **ENVIRONMENT) as program:
        assert await result(program) == (0, "", "")
    async with running(at(folder, ENGINE, "--port", port), folder, **ENVIRONMENT) as engine:
        await engine.says("the engine is ready")
        async with running(at(folder, API, "--port", port), folder, **ENVIRONMENT) as api:
            status, output, errors = await result(api)
            assert (status, answers(output), errors) == (0, expected(8), "")
        assert await engine.end(signal.SIGINT) == (0, "")


async def test_videos_that_were_lost_with_an_engine_are_sent_to_the_next_one(folder: Path, port: int) -> None:
    keys.make(folder / "keys")
    command = at(folder, ENGINE, "--port", port)
    async with running(at(folder, API, "--port", port, "--videos", 30), folder, **ENVIRONMENT) as api:
        async with running(command, folder, **ENVIRONMENT):
            assert api.process.stdout is not None
            first = (await api.process.stdout.readline()).decode()
        async with running(command, folder, **ENVIRONMENT):
            status, output, errors = await result(api)
    assert (status, answers(first + output)) == (0, expected(30))
    assert "was lost" in errors


async def test_an_api_server_with_other_keys_ends_with_an_error(folder: Path, port: int) -> None:
    other = folder / "other"
    other.mkdir()
    keys.make(folder / "keys")
    keys.make(other / "keys")
    async with running(at(folder, ENGINE, "--port", port), folder, **ENVIRONMENT) as engine:
        await engine.says("the engine is ready")
        async with running(at(other, API, "--port", port, "--videos", 1), folder, **ENVIRONMENT) as api:
            status, output, errors = await result(api)
    assert (status, output) == (1, "")
    assert "do not match: pass secret_key and server_key" in errors


async def test_key_files_are_private_and_never_replaced(folder: Path) -> None:
    keys.make(folder / "keys")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder / "keys").iterdir()}
    assert modes == {"engine.json": 0o600, "api.json": 0o600}
    assert stat.S_IMODE((folder / "keys").stat().st_mode) == 0o700
    before = keys.read(f"{folder}/keys/api.json", keys.ApiKeys)
    async with running(at(folder, MAKE_KEYS), folder, **ENVIRONMENT) as program:
        status, _, errors = await result(program)
    assert status == 1
    assert "exists" in errors
    assert keys.read(f"{folder}/keys/api.json", keys.ApiKeys) == before


@pytest.mark.parametrize(
    ("folders", "status", "text"),
    [
        ([], 2, "usage: two_hosts.keys"),
        (["no/keys"], 1, "no/keys cannot be created: No such file or directory"),
    ],
)
async def test_the_keys_need_a_folder_that_can_be_created(
    folder: Path, folders: list[str], status: int, text: str
) -> None:
    command = [*MAKE_KEYS[:-1], *(f"{folder}/{name}" for name in folders)]
    async with running(command, folder, **ENVIRONMENT) as program:
        found, output, errors = await result(program)
    assert (found, output) == (status, "")
    assert text in errors
    assert "Traceback" not in errors


def test_the_keys_of_the_other_side_are_refused_with_the_name_of_the_file(folder: Path) -> None:
    keys.make(folder / "keys")
    for name, kind in (("api.json", keys.EngineKeys), ("engine.json", keys.ApiKeys)):
        with pytest.raises(ValueError, match=rf"keys/{name} is not the key file of this side.*missing"):
            keys.read(f"{folder}/keys/{name}", kind)


async def test_the_programs_of_the_guide_print_what_it_shows(folder: Path, port: int) -> None:
    programs = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", GUIDE, re.DOTALL)
    assert len(programs) == GUIDE.count("```python") == 2
    for program, printed in programs:
        (folder / "program.py").write_text(
            program.replace(":7000", f":{port}").replace("unix:///tmp/", f"unix://{folder}/")
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-W", "error", "program.py"),
            cwd=folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        status, *written = await result(Program(process))
        assert (status, *written) == (0, printed, "")
