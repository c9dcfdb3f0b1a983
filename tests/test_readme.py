"""The programs of the README run as pasted into an empty folder."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from tests.pages import LIMIT_S, READY, ROOT, Folder, blocks, folder, upload
from verification.places import free_port

pytestmark = pytest.mark.timeout(LIMIT_S)

ENGINE, SERVER, MAKE_VIDEO = blocks("python", "README.md")
[SHOWN] = blocks("sh", "README.md")
[ANSWER] = re.findall(r"curl prints `(.*)`", (ROOT / "README.md").read_text())
PROGRAMS = {"engine.py": ENGINE, "server.py": SERVER, "make_video.py": MAKE_VIDEO}


def save_all(here: Folder) -> None:
    for name, program in PROGRAMS.items():
        here.save(name, program)


def damaged(video: bytes) -> bytes:
    """Return a video whose header and first frame are intact, and whose other frames cannot be decoded."""
    begin, end = video.index(b"mdat") + 4096, video.index(b"moov") - 4
    return video[:begin] + bytes(end - begin) + video[end:]


def test_the_engine_and_the_server_of_the_readme_answer_an_upload() -> None:
    with folder() as here:
        save_all(here)
        here.run("make_video.py")
        video = (here.path / "video.mp4").read_bytes()
        here.save("make_large_video.py", MAKE_VIDEO.replace("range(100)", "[0] * 1_600"))  # 1.1 GB
        here.run("make_large_video.py")
        large_video = damaged((here.path / "video.mp4").read_bytes())
        here.save("make_stream.py", MAKE_VIDEO.replace("video.mp4", "video.mkv"))
        here.run("make_stream.py")
        stream = (here.path / "video.mkv").read_bytes()  # its header does not contain the number of frames
        port = free_port()
        server = here.start_until(
            "startup complete", "-m", "uvicorn", "server:app", "--workers", "2", f"--port={port}"
        )
        engine = here.start_until(READY, "-W", "error", "engine.py")

        answer = {"frames": 100, "mean": pytest.approx(json.loads(ANSWER)["mean"])}
        for file in (video, stream):
            status, text = upload(port, file)
            assert (status, json.loads(text)) == (200, answer)
        for file in (b"no video", damaged(video)):
            assert upload(port, file) == (400, '{"detail":"the body is not a video"}')
        status, text = upload(port, large_video)  # refused before it is decoded
        assert (status, json.loads(text)["reason"]) == (413, "too_large")

        engine.kill()
        engine.wait()
        status, text = upload(port, video)
        assert (status, json.loads(text)["reason"]) == (503, "engine_unavailable")

        server.terminate()
        errors, _ = server.communicate(timeout=LIMIT_S)
        assert server.returncode == 0
        assert "Traceback" not in errors


def test_the_commands_of_the_readme_can_be_pasted_as_one_block() -> None:
    python, port = os.environ.get("AIOTENSOR_TEST_PYTHON", sys.executable), free_port()
    commands = SHOWN.replace("python ", f"{python} ").replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    commands = commands.replace("uvicorn server:app", f"{python} -m uvicorn server:app --port={port}")
    with folder() as here:
        save_all(here)
        with subprocess.Popen(
            ["/bin/bash", "-c", commands],
            cwd=here.path,
            env=here.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as shell:
            try:
                assert shell.wait(LIMIT_S) == 0  # that of curl
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(shell.pid, signal.SIGKILL)
            output, _ = shell.communicate()
    assert READY in output
    assert '{"frames":100,"mean":[' in output


def test_the_programs_of_the_readme_are_short() -> None:
    assert sum(bool(line) for line in (ENGINE + SERVER).splitlines()) <= 46
