"""Parsing of the addresses of socket files."""

import os
from pathlib import Path
from urllib.parse import quote

import pytest
import torch

from aiotensor import MessageServer, TensorReceiver, TensorSender
from aiotensor.transports.address import label_of, socket_path
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
        "inproc://engine",
        "unix:///run/folder/",
        "unix:///run/folder%2F",
        "unix:///run/%00",
        "unix:///run/\0",
        "unix:///\ud800",
        "unix:///" + "x" * 107,
        "unix:///" + "é" * 54,
        "unix:///" + "%FF" * 107,
    ):
        with pytest.raises(ValueError, match=r"the address .*|the path of the address"):
            socket_path(address)
        with pytest.raises(ValueError, match="address"):
            TensorSender(address)
        with pytest.raises(ValueError, match="address"):
            MessageServer(address, int)


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
        assert socket_path(f"unix://{written}") == path
    assert label_of("unix:///run/\udcff") == r"unix:///run/\udcff"


# ruff: noqa: ASYNC240 - the paths of tests are quick
async def test_all_roles_use_the_exact_file_of_an_address(path: Path) -> None:
    for name in (b"100%25", b"two words", b"\xff\xfe", b"a?b#c"):
        file = os.fsencode(path.parent) + b"/" + name
        address = f"unix://{quote(file)}"
        async with TensorReceiver(address) as receiver, TensorSender(address) as sender:
            assert os.path.exists(file)
            assert torch.equal(await receiver.receive(await sender.send(pattern(0, 3))), pattern(0, 3))
            assert (await inspect_receiver(address, patience_s=20)).id == receiver.id
        assert not os.path.exists(file)
