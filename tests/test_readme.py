"""The programs of the README run as pasted into an empty folder."""

import json
import re

import pytest

from tests.pages import LIMIT_S, READY, blocks, folder, upload
from verification.places import free_port

pytestmark = pytest.mark.timeout(LIMIT_S)

ENGINE, SERVER, MAKE_VIDEO = blocks("python", "README.md")
[SHOWN] = [shown for shown in blocks("console", "README.md") if "curl" in shown]


def test_the_engine_and_the_server_of_the_readme_answer_an_upload() -> None:
    assert "$ python engine.py &\n" + READY in SHOWN
    assert "$ uvicorn server:app --workers 2 &\n" in SHOWN
    with folder() as here:
        for name, program in (("engine.py", ENGINE), ("server.py", SERVER), ("make_video.py", MAKE_VIDEO)):
            here.save(name, program)
        here.run("make_video.py")
        video = (here.path / "video.mp4").read_bytes()
        port = free_port()
        server = here.start_until(
            "startup complete", "-m", "uvicorn", "server:app", "--workers", "2", f"--port={port}"
        )
        engine = here.start_until(READY, "-W", "error", "engine.py")

        status, text = upload(port, video)
        [shown] = re.findall(r"^\$ curl .*@video.mp4 .*/videos\n(.*)\n", SHOWN, re.MULTILINE)
        assert (status, json.loads(text)) == (
            200,
            {"frames": 100, "mean": pytest.approx(json.loads(shown)["mean"])},
        )
        assert upload(port, b"no video") == (400, '{"detail":"the body is not a video"}')

        engine.kill()
        engine.wait()
        status, text = upload(port, video)
        assert (status, json.loads(text)["reason"]) == (503, "engine_unavailable")

        server.terminate()
        errors, _ = server.communicate(timeout=LIMIT_S)
        assert server.returncode == 0
        assert "Traceback" not in errors


def test_the_programs_of_the_readme_are_short() -> None:
    assert sum(bool(line) for line in (ENGINE + SERVER).splitlines()) <= 50
