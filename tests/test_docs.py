"""The programs and lists in the documents are correct."""

import asyncio
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import av
import httpx
import numpy as np
import pytest
import torch

from aiotensor import TensorReceiver, TensorSender
from demo.clips import sample_clips
from verification.places import free_port

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))),
]
BROADCAST = "docs/broadcast.md"
GUIDE = "docs/guide.md"
# The interpreter that runs the programs: in `make test`, one of an environment that contains only the wheel.
PYTHON = os.environ.get("AIOTENSOR_TEST_PYTHON", sys.executable)
FOLDERS = [ROOT, ROOT / "aiotensor"]  # to which paths on a page may be relative


def _blocks(kind: str, page: str = "README.md") -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def _environment() -> dict[str, str]:
    # Without the path of the checkout, without coverage, which writes to standard error, and with buffers,
    # since processes print in parallel.
    excluded = ("COVERAGE_", "PYTHONPATH", "PYTHONUNBUFFERED")
    return {name: value for name, value in os.environ.items() if not name.startswith(excluded)}


def _run_program(which: int, folder: Path, page: str) -> str:
    """Run a program of a page, and return its output."""
    programs = _blocks("python", page)
    program = folder / "program.py"
    # At another path than on the page: several runs of these tests may be in progress.
    place = tempfile.mkdtemp(prefix="aiotensor-")
    program.write_text(programs[which].replace(":///tmp/", f"://{place}/"))
    environment = _environment()
    command = [PYTHON, "-W", "error", str(program)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=environment, timeout=120
    )
    shutil.rmtree(place)
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout


async def _answer(url: str, video: bytes) -> httpx.Response:
    """Upload a video; retry until the server accepts connections."""
    transport = httpx.AsyncHTTPTransport(retries=100)
    async with httpx.AsyncClient(transport=transport, timeout=60, trust_env=False) as http:
        return await http.post(url, content=video)


@pytest.mark.asyncio(loop_factories=["asyncio"])  # of the test; the programs have their own
async def test_the_server_and_the_engine_of_the_readme_answer_an_upload(tmp_path: Path) -> None:
    messages, engine, server = _blocks("python")[:3]
    start_engine, start_server, upload, *_ = _blocks("console")[2].splitlines()
    place = tempfile.mkdtemp(prefix="aiotensor-")
    (tmp_path / "messages.py").write_text(messages.replace("/tmp/", f"{place}/"))
    (tmp_path / "engine.py").write_text(engine)
    (tmp_path / "server.py").write_text(server)
    port = free_port()
    clip = sample_clips()[0]
    started = []
    try:
        for command, more in ((start_engine, []), (start_server, [f"--port={port}", "--log-level=warning"])):
            _, name, *arguments = shlex.split(command.removesuffix("&"))
            program = [PYTHON] if name == "python" else [PYTHON, "-m", name]
            started.append(
                await asyncio.create_subprocess_exec(
                    *program,
                    *arguments,
                    *more,
                    cwd=tmp_path,
                    env=_environment(),
                    stderr=asyncio.subprocess.PIPE,
                )
            )
        url = shlex.split(upload)[-1]
        assert url.startswith("http://127.0.0.1:8000/")
        answer = await _answer(url.replace("8000", str(port)), clip.read_bytes())
        assert answer.status_code == 200, answer.text
        with av.open(str(clip)) as video:
            colours = [frame.to_ndarray(format="rgb24")[::8, ::8] for frame in video.decode(video=0)]
        assert answer.json()["frames"] == len(colours)
        assert answer.json()["colour"] == pytest.approx(np.mean(colours, axis=(0, 1, 2)).tolist(), abs=0.01)
        refused = await _answer(url.replace("8000", str(port)), b"not a video")
        assert (refused.status_code, refused.json()) == (400, {"detail": "the body is not a video"})
        for process, number, status in zip(started[::-1], ("SIGTERM", "SIGINT"), (0, -2), strict=True):
            process.send_signal(signal.Signals[number])
            _, errors = await process.communicate()
            assert process.returncode in {status, 0, 1}
            assert number == "SIGINT" or errors == b""
    finally:
        for process in started:
            if process.returncode is None:
                process.kill()
                await process.wait()
        shutil.rmtree(place)


def test_the_programs_of_different_pages_do_not_share_addresses() -> None:
    pages: dict[str, list[str]] = {}
    for page in PAGES:
        text = "".join(_blocks("python", page))
        for address in set(re.findall(r"(?:unix|ipc|engine):///tmp/[\w.{}()-]+", text)):
            pages.setdefault(address, []).append(page)

    assert pages
    assert all(len(of) == 1 for of in pages.values()), pages


def test_the_program_with_a_handle_of_the_guide_runs_as_pasted(tmp_path: Path) -> None:
    printed = _run_program(0, tmp_path, GUIDE)
    assert printed.startswith("the engine has (120, 360, 640, 3) brightness 127.")


async def test_the_excerpts_of_the_guide_send_their_tensors(tmp_path: Path) -> None:
    excerpts = _blocks("python", GUIDE)[1:3]
    address = f"unix://{tmp_path}/engine"
    async with TensorReceiver(address) as receiver, TensorSender(address) as sender:
        for excerpt, count in zip(excerpts, (1, 2), strict=True):
            names = {
                "torch": torch,
                "decode_into": lambda frames: frames.fill(7),
                "video": torch.full((2,), 7),
                "audio": torch.full((3,), 7),
            }
            exec(f"async def run(sender):\n{textwrap.indent(excerpt, '    ')}", names)  # noqa: S102
            await names["run"](sender)  # type: ignore[operator]
            for _ in range(count):
                delivery = await anext(receiver)
                assert bool((delivery.tensor == 7).all())
                assert delivery.tensors == count


def test_a_request_with_a_video_takes_less_than_40_lines_and_runs_as_pasted(tmp_path: Path) -> None:
    printed = _run_program(3, tmp_path, GUIDE)
    assert re.match(r"the embedding of the video is tensor\(\[127\.\d+, 127\.\d+, 127\.\d+\]\)\n$", printed)
    assert len((tmp_path / "program.py").read_text().splitlines()) < 40


def test_all_workers_of_the_page_on_broadcast_have_the_last_weights(tmp_path: Path) -> None:
    printed = _run_program(0, tmp_path, BROADCAST)
    expected = [f"worker {name} has the weights of step 10" for name in "ab"]
    assert sorted(printed.splitlines()) == expected


def test_all_models_of_the_page_on_broadcast_see_each_frame_as_it_was_decoded(tmp_path: Path) -> None:
    printed = _run_program(1, tmp_path, BROADCAST)
    assert sorted(printed.splitlines()) == [
        "brightness: 10 batches, mean 79.5",
        "inverted: 10 batches, mean 175.5",
        "motion: 10 batches, mean 1.0",
    ]


@pytest.mark.parametrize("which", [2, 3])
def test_the_programs_of_the_page_on_broadcast_print_what_it_shows(tmp_path: Path, which: int) -> None:
    assert len(_blocks("python", BROADCAST)) == 4
    assert _run_program(which, tmp_path, BROADCAST) == _blocks("text", BROADCAST)[which - 2]


def test_every_test_that_shows_a_promise_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / "promises.md").read_text())
    assert len(named) > 30
    for path, name in named:
        text = (ROOT / path).read_text()
        assert not name or re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), f"{path}::{name}"


def test_the_promises_are_listed_once_each_and_in_order() -> None:
    listed = re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "promises.md").read_text(), re.MULTILINE)
    numbers = [int(number) for number in listed]
    assert numbers[:26] == list(range(1, 27))
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("page", PAGES)
def test_the_files_that_a_page_names_exist(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    named = re.findall(r"`((?:[\w.-]+/)+(?:[\w-]+\.(?:py|md|json))?)`", text)
    assert [path for path in named if not any((folder / path).exists() for folder in FOLDERS)] == []
