"""The command as a user runs it, on this machine and in processes that lack a resource."""

import io
import json
import os
import pty
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

import aiotensor
from aiotensor.cli.command import aiotensor as command
from aiotensor.cli.doctor.finding import Finding, Status, as_line, as_row, verdict
from aiotensor.cli.words import in_words
from tests.cli import commands

Findings = dict[str, dict[str, str]]

# The doctor alone: a package of the same name stands in for the library, which is not imported.
ALONE = """
import sys, types
package = types.ModuleType("aiotensor")
package.__path__ = [{folder!r}]
sys.modules["aiotensor"] = package
{before}
from aiotensor.cli.doctor.command import doctor
doctor(prog_name="aiotensor doctor", standalone_mode=False)
"""


def by_check(output: str) -> Findings:
    return {finding["check"]: finding for finding in json.loads(output)}


def run(*command_line: str) -> tuple[int, Findings]:
    """Run the doctor in a new process, which takes longer than the other ways."""
    done = subprocess.run([*command_line, "--json"], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, by_check(done.stdout)


def doctor(*arguments: str) -> tuple[int, Findings]:
    """Run the doctor in this process."""
    result = CliRunner().invoke(command, ["doctor", *arguments, "--json"])
    return result.exit_code, by_check(result.stdout)


def alone(before: str) -> str:
    """Return a program that runs the doctor alone, after some other code."""
    return ALONE.format(folder=str(Path(aiotensor.__file__).parent), before=before)


def doctor_after(before: str, *arguments: str) -> tuple[int, Findings]:
    """Run the doctor alone in a process that has imported torch, and has run some code first."""
    status, output, errors = commands.in_fork(alone(before), *arguments, "--json")
    assert errors == ""
    return status, by_check(output)


def problems(findings: Findings) -> list[str]:
    return [check for check, finding in findings.items() if finding["status"] == "problem"]


def test_doctor_finds_no_problem_on_this_machine() -> None:
    status, findings = run(*commands.aiotensor("doctor"))

    assert status == 0
    assert problems(findings) == []
    assert list(findings) == [
        "kernel",
        "shared memory",
        "unix sockets",
        "process ends",
        "copied pages",
        "socket folder",
        "memory",
        "memory cgroup",
        "commit limit",
        "open files",
        "subscribers",
        "/dev/shm",
        "huge pages",
        "start method",
        "uvloop",
        "torch",
        "CUDA",
        "process limits",
    ]
    for check in ("kernel", "shared memory", "unix sockets", "torch", "uvloop"):
        assert findings[check]["status"] == "ok"


def test_each_json_finding_has_four_keys_and_advice_unless_ok() -> None:
    _, findings = doctor()

    for finding in findings.values():
        assert list(finding) == ["check", "status", "found", "advice"]
        assert finding["status"] in ("ok", "note", "problem")
        assert finding["found"]
        assert (finding["advice"] is None) == (finding["status"] == "ok")


def test_without_a_terminal_doctor_prints_one_line_per_check() -> None:
    result = CliRunner().invoke(command, ["doctor"])
    structured = CliRunner().invoke(command, ["doctor", "--json"])

    assert result.exit_code == 0
    *lines, last = result.output.splitlines()
    for line, finding in zip(lines, json.loads(structured.output), strict=True):
        assert line.split()[0] == finding["status"]
        assert f"  {finding['check']}: " in line
        assert line.endswith(finding["advice"] or "")
        assert "\x1b" not in line
    assert last.startswith("all requirements are met")


def test_the_checks_that_do_not_need_torch_are_printed_before_it_is_imported() -> None:
    code = """
import sys
from importlib.abc import MetaPathFinder

class Reporter(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print("import of torch")

sys.meta_path.insert(0, Reporter())
from aiotensor.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code, "doctor"], capture_output=True, text=True, check=True)
    names = [line.partition("  ")[2].partition(":")[0].strip() for line in done.stdout.splitlines()]

    assert names[names.index("uvloop") + 1 :][:2] == ["", "torch"]  # the report, and the check


@pytest.mark.parametrize("without_rich", [False, True])
def test_on_a_terminal_doctor_uses_rich_if_installed(without_rich: bool) -> None:
    blocked = "sys.modules['rich'] = None" if without_rich else ""
    leader, follower = pty.openpty()
    environment = {**os.environ, "COLUMNS": "60", "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen([sys.executable, "-c", alone(blocked)], stdout=follower, env=environment)
    os.close(follower)
    output = b""
    with open(leader, "rb", buffering=0) as screen, process:
        try:
            while piece := screen.read(1 << 16):
                output += piece
        except OSError:  # what Linux says once the other end is closed
            pass

    text = output.decode()
    assert process.returncode == 0
    assert "memfd" in text
    assert "all requirements are met" in text
    assert ("\x1b[32mok" in text) is not without_rich
    assert any(len(line) > 80 for line in text.splitlines()) is without_rich


def test_doctor_imports_only_few_modules_of_the_library(tmp_path: Path) -> None:
    names = tmp_path / "modules"
    code = alone(
        f"import atexit, pathlib; write = pathlib.Path({str(names)!r}).write_text\n"
        "atexit.register(lambda: write(' '.join(sys.modules)))"
    )
    status, _ = run(sys.executable, "-W", "error", "-c", code)

    assert status == 0
    rooms = {name for name in names.read_text().split() if name.startswith("aiotensor.")}
    assert "aiotensor.cli.doctor.memory" in rooms
    assert {name for name in rooms if not name.startswith("aiotensor.cli.doctor")} == {
        "aiotensor.runtime",
        "aiotensor.runtime.cgroups",
        "aiotensor.cli",
        "aiotensor.cli.addresses",
        "aiotensor.cli.keys",
        "aiotensor.cli.words",
        "aiotensor.runtime.logs",
        "aiotensor.protocol",
        "aiotensor.protocol.blocks",
    }


@pytest.mark.parametrize(
    ("before", "check", "found", "advice"),
    [
        (
            "import os\ndef no(*_): raise OSError(38, 'Function not implemented')\nos.memfd_create = no",
            "shared memory",
            "memfd_create failed: Function not implemented",
            "seccomp",
        ),
        ("import os; del os.memfd_create", "shared memory", "no os.memfd_create", "glibc 2.27"),
        (
            "import os; os.memfd_create = lambda *_: os.open('/tmp', os.O_TMPFILE | os.O_RDWR)",
            "shared memory",
            "sealing a memfd failed",
            "Allow it",
        ),
        (
            "import fcntl; fcntl.fcntl = lambda *_: 0",
            "shared memory",
            "a sealed memfd can still be resized",
            "does not behave like Linux",
        ),
        (
            "import socket; socket.recv_fds = lambda *_: (b'x', [], 0, None)",
            "shared memory",
            "(SCM_RIGHTS) did not arrive",
            "does not behave like Linux",
        ),
        (
            "import socket; socket.SOCK_SEQPACKET = socket.SOCK_STREAM",
            "unix sockets",
            "does not preserve the boundaries of records",
            "does not behave like Linux",
        ),
        (
            "import socket; socket.SOCK_SEQPACKET = 99",
            "unix sockets",
            "a Unix socket of type SOCK_SEQPACKET failed",
            "seccomp",
        ),
        (
            "import socket; socket.SO_PEERCRED = socket.SO_TYPE",
            "unix sockets",
            "SO_PEERCRED does not identify",
            "does not behave like Linux",
        ),
        ("sys.modules['torch'] = None", "torch", "cannot be imported", "pip install 'torch>=2.6'"),
        (
            "import torch; torch.__version__, torch.version.cuda = '2.5.1+cpu', None",
            "torch",
            "2.5.1+cpu, built for the CPU: too old",
            "pip install 'torch>=2.6'",
        ),
        ("import platform, torch; platform.system = lambda: 'Darwin'", "kernel", "Darwin", "Use Linux"),
        ("import platform; platform.release = lambda: '3.10.0-1160.el7'", "kernel", "3.10.0", "Update it"),
    ],
)
def test_a_missing_requirement_causes_exit_status_1(before: str, check: str, found: str, advice: str) -> None:
    status, findings = doctor_after(before)

    assert status == 1
    assert problems(findings) == [check]
    assert found in findings[check]["found"]
    assert advice in findings[check]["advice"]


def test_missing_uvloop_is_a_note_with_an_install_command() -> None:
    status, findings = doctor_after("sys.modules['uvloop'] = None")

    assert status == 0
    assert findings["uvloop"]["status"] == "note"
    assert "pip install uvloop" in findings["uvloop"]["advice"]


@pytest.mark.parametrize(
    ("before", "check", "found", "advice"),
    [
        (
            "import socket; socket.socket.getsockopt = lambda *_: no(92, 'Protocol not available')",
            "process ends",
            "identified by their pids (SO_PEERPIDFD: Protocol not available): if another",
            "Linux 6.5",
        ),
        (
            "import os; os.pidfd_open = lambda *_: no(1, 'Operation not permitted')",
            "process ends",
            "(pidfd_open: Operation not permitted): the memory of a killed subscriber stays in use",
            "Linux 5.3",
        ),
        ("import os; del os.pidfd_open", "process ends", "missing in this build of Python", "Linux 5.3"),
        (
            "import os; os.pread = lambda *_: no(1, 'Operation not permitted')",
            "copied pages",
            "cannot be read: Operation not permitted: a subscriber",
            "Mount /proc",
        ),
        (
            "import os; os.pread = lambda *_: b''",
            "copied pages",
            "cannot be read: Input/output",
            "Mount /proc",
        ),
        (
            "import os; os.pread = lambda *_: bytes(8)",
            "copied pages",
            "does not show which pages were written",
            "Mount /proc",
        ),
    ],
)
def test_functions_for_broadcast_that_the_kernel_lacks_are_a_note(
    before: str, check: str, found: str, advice: str
) -> None:
    _, findings = doctor_after(f"def no(*reason): raise OSError(*reason)\n{before}")

    assert findings[check]["status"] == "note"
    assert found in findings[check]["found"]
    assert advice in findings[check]["advice"]


def test_the_number_of_subscribers_is_compared_with_the_limit_on_descriptors() -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))"
    status, findings = doctor_after(limit)
    _, few = doctor_after(limit, "--subscribers", "32")

    assert status == 0
    assert findings["subscribers"]["found"].startswith("descriptors for about 32 of one publisher at once")
    assert "ulimit -n 1024" in findings["subscribers"]["advice"]
    assert few["subscribers"]["status"] == "ok"


def test_few_descriptors_are_a_note() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (40, {}))"
    status, findings = doctor_after(limit.format(most))
    _, low = doctor_after(limit.format(50))

    assert status == 0
    assert findings["open files"]["status"] == low["open files"]["status"] == "note"
    assert findings["open files"]["found"].startswith("at most 40, and ")
    assert "ulimit -n" in findings["open files"]["advice"]
    assert low["open files"]["found"].startswith("at most 40, and 50 if raised")
    assert "hard limit" in low["open files"]["advice"]


def test_an_address_space_without_room_for_the_arena_is_a_note() -> None:
    limit = """
import pathlib, resource, torch
mapped = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (512 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))
"""
    status, findings = doctor_after(limit)
    _, small = doctor_after(limit, "--arena-bytes", str(1 << 20))

    assert status == 0
    assert findings["process limits"]["status"] == "note"
    assert "(ulimit -v)" in findings["process limits"]["found"]
    assert small["process limits"]["status"] == "ok"


def test_a_limit_on_the_size_of_files_holds_for_shared_memory_too() -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))"
    status, findings = doctor_after(limit.format(1 << 20))
    _, page = doctor_after(limit.format(resource.getpagesize()))
    nothing, none = doctor_after(limit.format(0))

    assert status == 0
    assert findings["process limits"]["status"] == "note"
    assert "files of at most 1.0 MiB (ulimit -f)" in findings["process limits"]["found"]
    assert page["shared memory"]["status"] == "ok"
    assert nothing == 1
    assert "ulimit -f" in none["shared memory"]["advice"]


def test_the_size_of_the_arena_can_be_given() -> None:
    status, findings = doctor("--arena-bytes", str(1 << 55))

    assert status == 0
    assert findings["memory"]["status"] == "note"
    assert "an arena of 32.0 PiB" in findings["memory"]["found"]


def test_an_address_that_cannot_be_used_is_a_problem(tmp_path: Path) -> None:
    status, findings = doctor("--address", f"unix://{tmp_path}/missing/socket")

    assert status == 1
    assert problems(findings) == ["socket folder"]
    assert "does not exist" in findings["socket folder"]["found"]
    assert "mkdir" in findings["socket folder"]["advice"]


def test_the_folder_of_an_engine_need_not_exist(tmp_path: Path) -> None:
    status, findings = doctor("--address", f"engine://{tmp_path}/engine")

    assert status == 0
    assert findings["socket folder"]["found"] == f"the engine creates {tmp_path}/engine"
    assert "nothing exists there yet" in findings["socket file"]["found"]


def test_the_address_of_a_message_server_is_rejected_with_an_explanation() -> None:
    result = CliRunner().invoke(command, ["doctor", "--address", "ipc:///run/engine.messages"])

    assert result.exit_code == 2
    assert "is the address of a MessageServer, which cannot be inspected" in " ".join(result.output.split())


def test_an_unusable_default_folder_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))

    status, findings = doctor()

    assert status == 0
    assert findings["socket folder"]["status"] == "note"


@pytest.mark.parametrize("address", ["engine.sock", "unix://engine.sock", "unix:///run/", "tcp://host", ""])
def test_doctor_rejects_an_invalid_address(address: str) -> None:
    result = CliRunner().invoke(command, ["doctor", "--address", address])

    assert result.exit_code == 2
    assert "--address" in result.output
    assert f"the address {address!r}" in result.output


def test_an_arena_of_no_bytes_is_refused() -> None:
    assert CliRunner().invoke(command, ["doctor", "--arena-bytes", "0"]).exit_code == 2


@pytest.mark.parametrize(
    ("statuses", "sentence"),
    [
        ([Status.OK], "all requirements are met"),
        ([Status.OK, Status.NOTE], "all requirements are met, 1 note"),
        ([Status.NOTE, Status.PROBLEM, Status.NOTE], "some requirements are not met, 1 problem, 2 notes"),
        ([Status.PROBLEM, Status.PROBLEM], "some requirements are not met, 2 problems"),
    ],
)
def test_the_last_line_sums_up(statuses: list[Status], sentence: str) -> None:
    assert verdict([Finding(status, "found") for status in statuses]) == sentence


def test_a_line_contains_the_finding_and_then_the_advice() -> None:
    line = as_line("uvloop", Finding(Status.NOTE, "missing", "Get it"))

    assert line == "note     uvloop: missing. Get it"


def test_a_row_shows_the_finding_verbatim_with_advice_below() -> None:
    console = Console(width=60, file=io.StringIO())
    console.print(as_row("socket folder", Finding(Status.PROBLEM, "/tmp/[red]", "Choose another")))

    assert isinstance(console.file, io.StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert lines == [["problem", "socket", "folder", "/tmp/[red]"], ["Choose", "another"]]


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB"), (1 << 70, "1024.0 EiB")],
)
def test_bytes_are_written_in_a_unit_that_suits_them(nbytes: int, words: str) -> None:
    assert in_words(nbytes) == words
