"""Parsing of the addresses of socket files, which tensors and messages share."""

import os
from pathlib import Path
from urllib.parse import quote

import pytest
import torch

from aiotensor import TensorReceiver, TensorSender
from aiotensor.channel import MessageServer
from aiotensor.transports.address import label_of, socket_path
from tests.channel.parties import Question
from verification.inspecting import inspect_receiver
from verification.patterns import pattern

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def test_an_address_that_names_no_socket_is_refused() -> None:
    for address in (
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
        "unix:///" + "%FF" * 107,
        "engine://",
        "engine://relative",
        "engine:///run/engine/",
    ):
        for scheme in ("unix", "ipc"):
            with pytest.raises(ValueError, match=r"the address .*|the path of the address"):
                socket_path(address.replace("unix", scheme), scheme)
        with pytest.raises(ValueError, match="address"):
            TensorSender(address)
        with pytest.raises(ValueError, match="address"):
            MessageServer(address.replace("unix", "ipc"), Question)


def test_the_path_of_an_address_is_decoded_like_that_of_a_url() -> None:
    for written, path in (
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
    ):
        for scheme in ("unix", "ipc"):
            assert socket_path(f"{scheme}://{written}", scheme) == path
    assert label_of("unix:///run/\udcff") == r"unix:///run/\udcff"


# ruff: noqa: ASYNC240 - the paths of tests are quick
async def test_tensors_and_messages_use_the_exact_file_of_an_address(path: Path) -> None:
    for name in (b"100%25", b"two words", b"\xff\xfe", b"a?b#c"):
        file = os.fsencode(path.parent) + b"/" + name
        written = quote(file)
        async with (
            TensorReceiver(f"unix://{written}") as receiver,
            TensorSender(f"unix://{written}") as sender,
        ):
            assert os.path.exists(file)
            assert torch.equal(await receiver.receive(await sender.send(pattern(0, 3))), pattern(0, 3))
            assert (await inspect_receiver(f"unix://{written}", patience_s=20)).receiver == receiver.id
        assert not os.path.exists(file)
        async with MessageServer(f"ipc://{written}", Question) as server:
            assert server.address == f"ipc://{written}"
            assert os.path.exists(file)
        assert not os.path.exists(file)


def test_the_error_about_a_missing_slash_shows_a_valid_address() -> None:
    for address in ("engine://run/engine", "engine:/run/engine", "engine:run"):
        for make in (TensorSender, lambda address: MessageServer(address, Question)):
            with pytest.raises(ValueError, match="such as engine:///run/user/1000/engine, or tcp://"):
                make(address)


def test_both_sockets_of_an_engine_need_a_path_that_is_short_enough() -> None:
    folder = "engine:///" + "x" * (106 - len("/messages"))
    for make in (TensorSender, lambda address: MessageServer(address, Question)):
        make(folder)
        with pytest.raises(ValueError, match="longer than the 107 bytes"):
            make(f"{folder}x")
