"""Each step of the tutorial works as a reader performs it, and the tests of the guide pass.

`AIOTENSOR_TEST_PYTHON` is the interpreter that runs the programs: the same tests check an installed wheel in
an environment with `aiotensor[cli,fastapi,prometheus]`, `av` and `uvicorn`.
"""

import json
import os
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests.pages import LIMIT_S, READY, ROOT, Folder, blocks, folder, upload
from verification.places import free_port

pytestmark = [pytest.mark.extended, pytest.mark.timeout(LIMIT_S)]

PAGE = "docs/tutorial.md"
MAKE_VIDEO, MESSAGES, ENGINE, ASK, SERVER, UPLOAD, METRICS = blocks("python", PAGE)
SHOWN = "\n".join(blocks("console", PAGE))


@dataclass
class Site:
    """The folder of the reader, with the programs of all steps."""

    folder: Folder
    port: int = field(default_factory=free_port)

    def start_engine(self) -> subprocess.Popen[str]:
        """Start the engine, and wait until it says that it is ready."""
        return self.folder.start_until(READY, "engine.py")

    def start_server(self) -> subprocess.Popen[str]:
        """Start the server, and wait until it accepts connections."""
        return self.folder.start_until("running on", "-m", "uvicorn", "server:app", f"--port={self.port}")

    def upload(self) -> tuple[int, str]:
        """Upload the video."""
        return upload(self.port, (self.folder.path / "video.mp4").read_bytes())


@pytest.fixture
def site() -> Iterator[Site]:
    with folder() as made:
        site = Site(made)
        made.save("make_video.py", MAKE_VIDEO)
        made.save("messages.py", MESSAGES)
        made.save("engine.py", ENGINE)
        made.save("ask.py", ASK)
        made.save("server.py", SERVER)
        made.save("upload.py", UPLOAD.replace(":8000/", f":{site.port}/"))
        made.run("make_video.py")
        yield site


def test_the_engine_answers_a_request_with_the_scenes_of_the_video(site: Site) -> None:
    site.start_engine()
    assert f"$ python ask.py video.mp4\n{site.folder.run('ask.py', 'video.mp4')}" in SHOWN


def test_the_server_answers_an_upload_and_survives_a_restart_of_the_engine(site: Site) -> None:
    engine = site.start_engine()
    site.start_server()
    status, text = site.upload()
    assert (status, f"{text}\n" in SHOWN) == (200, True)
    assert upload(site.port, b"no video") == (400, '{"detail":"the body is not a video"}')

    engine.kill()
    engine.wait()
    status, text = site.upload()
    assert (status, f"{text}\n" in SHOWN) == (503, True), text

    site.start_engine()
    assert site.upload()[0] == 200


def test_uploads_beyond_the_permits_wait_and_are_answered_with_503(site: Site) -> None:
    assert "`time.sleep(1)` as the first line of\n`model`" in (ROOT / PAGE).read_text()
    slow = ENGINE.replace("def model(video):\n", "def model(video):\n    time.sleep(1)\n")
    site.folder.save("engine.py", f"import time\n{slow}")
    site.start_engine()
    site.start_server()
    printed = site.folder.run("upload.py", "20")
    numbers = {status: int(number) for number, status in re.findall(r"(\d+) uploads .* with (\d+)", printed)}
    assert numbers.keys() == {"200", "503"}, printed
    assert sum(numbers.values()) == 20
    assert numbers["200"] >= 2


def test_metrics_and_top_show_the_engine_and_its_server(site: Site) -> None:
    site.folder.save("server.py", SERVER + METRICS)
    site.start_engine()
    site.start_server()
    assert site.upload()[0] == 200
    with urllib.request.urlopen(f"http://127.0.0.1:{site.port}/metrics") as response:
        metrics = response.read().decode()
    assert re.search(r"^aiotensor_client_permits_limit\{.*\} 2.0$", metrics, re.MULTILINE)
    assert re.search(r"^aiotensor_client_permits_in_use\{.*\} 0.0$", metrics, re.MULTILINE)

    assert "$ aiotensor top unix:///tmp/tutorial-$(id -u).sock\n" in SHOWN
    address = f"unix://{site.folder.path}/tutorial-{os.getuid()}.sock"
    shown = json.loads(site.folder.run("-m", "aiotensor", "top", address, "--json"))
    assert (shown["statistics"]["clients"], shown["statistics"]["messages_taken"]) == (1, 1)


def test_the_tests_of_the_guide_pass() -> None:
    programs = [
        text for text in blocks("python", "docs/guide.md") if re.search("make_app|pytest_plugins", text)
    ]
    with folder() as here:
        for name, program in zip(("conftest.py", "server.py", "test_server.py"), programs, strict=True):
            here.save(name, program)
        here.save("pytest.ini", "[pytest]\nasyncio_default_fixture_loop_scope = function\n")
        assert "3 passed" in here.run("-m", "pytest", "-p", "no:cacheprovider")
