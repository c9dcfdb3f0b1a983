"""The key files: `aiotensor keys` writes them, and the command and connections use them."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from aiotensor.channel import MessageClient, MessageServer
from aiotensor.cli.command import aiotensor as command
from tests.cli import commands
from tests.cli.commands import Pair
from verification.places import free_port

ELSEWHERE = "tcp://192.0.2.1:5555"  # no machine has it (RFC 5737); it is refused before any connection
HERE = "tcp://127.0.0.1:1"
NOT_OURS = "is not the key file of a side that connects, such as api.json"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def usage_error(result: Result) -> str:
    assert result.exit_code == 2
    *_, last = result.output.splitlines()
    return last


def read(file: Path) -> dict[str, Any]:
    keys: dict[str, Any] = json.loads(file.read_text())
    return keys


async def test_the_written_files_connect_both_sides_and_are_read_by_top_and_doctor(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    assert (await commands.run("keys", str(folder))).exit_code == 0
    listening, connecting = read(folder / "engine.json"), read(folder / "api.json")
    address = f"tcp://127.0.0.1:{free_port()}"
    # The same port, by an address that needs keys.
    reached = address.replace("127.0.0.1", "0.0.0.0")  # noqa: S104 - nothing listens at it

    async def model(message: Any) -> float:
        return float(message["frames"].sum())

    async with MessageServer(address, dict, **listening) as server:
        serving = asyncio.create_task(server.serve(model))
        async with MessageClient(address, float, **connecting) as client:
            frames = torch.ones(100_000)
            assert await asyncio.wait_for(client.request({"frames": frames}), 30) == 100_000
        given = ("--keys", str(folder / "api.json"))
        seen = await commands.run("top", reached, "--patience", "10", *given)
        checked = await commands.run("doctor", "--json", "--address", reached, *given)
        serving.cancel()

    assert (seen.stderr, seen.exit_code) == ("", 0)
    assert seen.stdout.startswith(f"server pid {os.getpid()}  {reached}\n")
    findings = {finding["check"]: finding for finding in json.loads(checked.stdout)}
    assert findings["listener"]["found"] == f"a server (pid {os.getpid()}) answers"
    assert checked.exit_code == 0


def test_each_side_that_connects_has_its_own_pair_in_a_file_of_this_user(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    assert invoke("keys", str(folder), "api-1", "api-2").exit_code == 0
    engine, *apis = (read(folder / f"{name}.json") for name in ("engine", "api-1", "api-2"))

    assert len({keys["secret_key"] for keys in (engine, *apis)}) == 3
    assert len(set(engine["client_keys"])) == 2
    assert apis[0]["server_key"] == apis[1]["server_key"]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700


def test_existing_keys_are_not_replaced(tmp_path: Path) -> None:
    again, nowhere = invoke("keys", str(tmp_path)), invoke("keys", str(tmp_path / "no" / "keys"))

    assert (again.exit_code, nowhere.exit_code) == (1, 1)
    assert again.output == f"Error: {tmp_path} exists; its keys may be in use, so they are not replaced\n"
    assert nowhere.output == f"Error: {tmp_path}/no/keys cannot be created: No such file or directory\n"


@pytest.mark.parametrize("names", [["engine"], ["a", "a"], ["a/b"], [".."], [""]])
def test_names_that_cannot_be_those_of_sides_are_a_usage_error(names: list[str], tmp_path: Path) -> None:
    assert "cannot be the name of a side" in usage_error(invoke("keys", str(tmp_path / "keys"), *names))
    assert not (tmp_path / "keys").exists()


def test_missing_or_superfluous_keys_are_a_usage_error_that_names_the_option(tmp_path: Path) -> None:
    pair = Pair.new()
    missing = usage_error(invoke("top", ELSEWHERE))
    assert f"any machine that reaches {ELSEWHERE} could connect. Pass --keys" in missing
    by_file = ("--keys", pair.file(tmp_path, pair.public))
    for arguments in (("top", "unix:///tmp/s"), ("doctor", "--address", "unix:///tmp/s"), ("doctor",)):
        assert "can only be used with tcp:// addresses" in usage_error(invoke(*arguments, *by_file))


def test_a_secret_is_never_an_argument_and_never_shown(tmp_path: Path) -> None:
    pair = Pair.new()
    file = pair.file(tmp_path, pair.public)
    Path(file).write_text(Path(file).read_text().replace(pair.secret, pair.secret[:-1]))

    assert "cannot be read" in usage_error(invoke("top", ELSEWHERE, "--keys", pair.secret.replace("/", "")))
    message = usage_error(invoke("top", HERE, "--keys", file))
    assert "secret_key must contain keys of 40 characters" in message
    assert pair.secret[:-1] not in message


def test_the_file_of_the_other_side_or_another_file_is_a_usage_error(tmp_path: Path) -> None:
    assert invoke("keys", str(tmp_path / "keys")).exit_code == 0
    (tmp_path / "other").write_bytes(b"\xff")
    (tmp_path / "key").write_text("x" * 40)
    (tmp_path / "list").write_text('{"secret_key": ["secret"], "server_key": "key"}')
    assert "'--keys': " in usage_error(invoke("top", HERE, "--keys", str(tmp_path)))
    for name in ("keys/engine.json", "other", "key", "list"):
        message = usage_error(invoke("top", HERE, "--keys", str(tmp_path / name)))
        assert NOT_OURS in message
        assert "secret'" not in message
