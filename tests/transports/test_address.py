"""Parsing of the addresses of socket files, which tensors and messages share."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
import torch
from click.testing import CliRunner

from aiotensor import TensorReceiver, TensorSender
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.cli.command import aiotensor as command
from aiotensor.transports.address import label_of, socket_path
from tests.channel.parties import Answer, Question, answer
from verification.inspecting import inspect_receiver
from verification.patterns import pattern

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

SCHEMES = ["unix", "ipc"]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "address",
    [
        "",
        "/run/engine.sock",
        "unix:",
        "unix://",
        "unix://engine.sock",
        "unix:engine.sock",
        "unix://host/run/engine.sock",
        "unix:///run/engine.sock?mode=1",
        "unix:///run/engine.sock#part",
        "tcp:///run/engine.sock",
        "unix:///run/folder/",
        "unix:///run/folder%2F",
        "unix:///run/%00",
        "unix:///run/\0",
        "unix:///\ud800",
        "unix:///" + "x" * 107,
        "unix:///" + "é" * 54,
        "unix:///" + "%C3%A9" * 54,
        "unix:///" + "%FF" * 107,
    ],
)
def test_an_address_that_names_no_socket_is_refused(address: str, scheme: str) -> None:
    address = address.replace("unix", scheme)
    with pytest.raises(ValueError, match=r"the address .*|the path of the address"):
        socket_path(address, scheme)
    if scheme == "unix":
        with pytest.raises(ValueError, match="address"):
            TensorSender(address)
    else:
        with pytest.raises(ValueError, match="address"):
            MessageServer(address, Question)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("/run/engine.sock", "/run/engine.sock"),
        ("/run/two%20words", "/run/two words"),
        ("/run/two words", "/run/two words"),
        ("/run/100%25", "/run/100%"),
        ("/run/100%", "/run/100%"),  # no digits follow
        ("/run/%3Fa%23b", "/run/?a#b"),
        ("/run/%C3%A9", "/run/é"),
        ("/run/é", "/run/é"),
        ("/run/%FF", "/run/\udcff"),
        ("/run/\udcff", "/run/\udcff"),
        ("/run/a\tb\n", "/run/a\tb\n"),
        ("/" + "x" * 106, "/" + "x" * 106),
        ("/" + "%78" * 106, "/" + "x" * 106),
    ],
)
def test_the_path_of_an_address_is_decoded_like_that_of_a_url(scheme: str, written: str, path: str) -> None:
    assert socket_path(f"{scheme}://{written}", scheme) == path


def test_a_label_can_be_encoded_whatever_the_path_is() -> None:
    assert label_of("unix:///run/\udcff") == r"unix:///run/\udcff"


NAMES = {"percent": b"100%25", "words": b"two words", "no UTF-8": b"\xff\xfe", "question": b"a?b#c"}


@pytest.mark.parametrize("name", NAMES)
async def test_tensors_and_messages_use_the_exact_file_of_an_address(name: str, path: Path) -> None:
    for form in (quote, os.fsdecode):
        if form is os.fsdecode and name in ("question", "percent"):
            continue  # which has to be quoted
        file = os.fsencode(path.parent) + b"/" + NAMES[name]
        await _meet(form(file), file)


def _is_there(file: bytes) -> bool:
    return os.path.exists(file)


async def _meet(written: str, file: bytes) -> None:
    async with TensorReceiver(f"unix://{written}") as receiver, TensorSender(f"unix://{written}") as sender:
        assert _is_there(file)
        tensor = await receiver.receive(await sender.send(pattern(0, 3)))
        assert torch.equal(tensor, pattern(0, 3))
        assert (await inspect_receiver(f"unix://{written}", patience_s=20)).receiver == receiver.id
    assert not _is_there(file)
    async with (
        MessageServer(f"ipc://{written}", Question) as server,
        MessageClient(server.address, reply_type=Answer) as client,
    ):
        assert server.address == f"ipc://{written}"
        assert _is_there(file)
        serving = asyncio.create_task(server.serve(answer))
        assert (await client.request(Question(7))).seed == 7
        await server.aclose()
        await serving
    assert not _is_there(file)


def test_the_doctor_checks_the_exact_folder_of_an_address(path: Path) -> None:
    (path.parent / "two words").mkdir(mode=0o700)
    result = CliRunner().invoke(command, ["doctor", "--address", f"unix://{path.parent}/two%20words/s"])
    assert f"this user can create sockets in {path.parent}/two words\n" in result.output


@pytest.mark.parametrize("address", ["engine://run/engine", "engine:/run/engine", "engine:run"])
@pytest.mark.parametrize("make", [TensorSender, lambda address: MessageServer(address, Question)])
def test_the_error_about_a_missing_slash_shows_a_valid_address(
    address: str, make: Callable[[str], object]
) -> None:
    with pytest.raises(ValueError, match="such as engine:///run/user/1000/engine, or tcp://"):
        make(address)


def test_both_sockets_of_an_engine_need_a_path_that_is_short_enough() -> None:
    folder = "engine:///" + "x" * (106 - len("/messages"))
    for make in (TensorSender, lambda address: MessageServer(address, Question)):
        make(folder)
        with pytest.raises(ValueError, match="longer than the 107 bytes"):
            make(f"{folder}x")
