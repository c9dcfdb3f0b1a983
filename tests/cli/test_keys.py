"""The options for keys: the sources of a secret key, and the errors for keys that cannot be used."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from aiotensor.cli.command import aiotensor as command
from tests.cli.commands import Pair

ELSEWHERE = "tcp://192.0.2.1:5555"  # no machine has it (RFC 5737); it is refused before any connection
HERE = "tcp://127.0.0.1:1"
NO_KEY = "expected a key of 40 characters, as returned by zmq.curve_keypair()"


def top(*arguments: str, **environment: str) -> Result:
    return CliRunner(env=environment).invoke(command, ["top", *arguments])


def usage_error(result: Result) -> str:
    assert result.exit_code == 2
    *_, last = result.output.splitlines()
    return last


@pytest.fixture
def pair() -> Pair:
    return Pair.new()


@pytest.fixture
def file(tmp_path: Path, pair: Pair) -> str:
    return pair.secret_file(tmp_path)


def test_missing_or_superfluous_keys_are_a_usage_error_that_names_the_options(pair: Pair, file: str) -> None:
    by_key, by_file = ("--server-key", pair.public), ("--secret-key-file", file)
    for arguments, secret, words in (
        ((ELSEWHERE,), pair.secret, f"any machine that reaches {ELSEWHERE} could connect. Pass --server-key"),
        ((ELSEWHERE, *by_key), "", "--server-key requires the secret key of this side"),
        ((ELSEWHERE, *by_file), "", "--secret-key-file requires --server-key"),
        (("unix:///tmp/s", *by_key, *by_file), "", "can only be used with tcp:// addresses"),
    ):
        assert words in usage_error(top(*arguments, AIOTENSOR_SECRET_KEY=secret))
    result = CliRunner().invoke(command, ["doctor", "--address", "unix:///tmp/s", *by_key, *by_file])
    assert "can only be used with tcp:// addresses" in usage_error(result)


def test_a_secret_in_the_environment_does_not_matter_for_addresses_without_keys(pair: Pair) -> None:
    for address in (HERE, "unix:///tmp/no/such/folder/s"):
        result = top(address, "--patience", "0.1", AIOTENSOR_SECRET_KEY=pair.secret)
        assert result.exit_code == 1
        assert "listens at" in result.output


def test_a_secret_is_never_an_argument_and_never_shown(pair: Pair, tmp_path: Path) -> None:
    typo = tmp_path / "typo"
    typo.write_text(pair.secret[:-1])

    assert "No such option" in top(ELSEWHERE, "--secret-key", pair.secret).output
    for message in (
        usage_error(top(HERE, "--server-key", pair.public, "--secret-key-file", str(typo))),
        usage_error(top(HERE, "--server-key", pair.public, AIOTENSOR_SECRET_KEY=pair.secret[:-1])),
    ):
        assert message.endswith(NO_KEY)
        assert pair.secret[:-1] not in message


def test_the_error_of_an_unreadable_key_file_names_the_file(tmp_path: Path, pair: Pair) -> None:
    missing = str(tmp_path / "missing")
    secret = usage_error(top(HERE, "--server-key", pair.public, "--secret-key-file", missing))
    server = usage_error(top(HERE, "--server-key", str(tmp_path)))

    assert "'--secret-key-file'" in secret
    assert f"{missing!r} cannot be read: No such file or directory" in secret
    assert "'--server-key'" in server
    assert f"{str(tmp_path)!r} cannot be read: Is a directory" in server


@pytest.mark.parametrize("text", ["", "x" * 39, "#" * 40, "é" * 20, "\n" * 40])
def test_a_malformed_key_is_a_usage_error(text: str, tmp_path: Path, pair: Pair) -> None:
    file = tmp_path / "file"
    file.write_text(text)

    for arguments in (
        ("--server-key", text),
        ("--server-key", str(file)),
        ("--server-key", pair.public, "--secret-key-file", str(file)),
    ):
        assert NO_KEY in usage_error(top(HERE, *arguments))
