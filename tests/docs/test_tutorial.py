"""Each step of the tutorial works as a reader performs it, with the programs of the page.

`AIOTENSOR_TEST_PYTHON` is the interpreter that runs the programs: the same tests check an installed wheel in
an environment with `aiotensor[cli,fastapi,prometheus]`, `av` and `uvicorn`.
"""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest

from tests.docs.pages import LIMIT_S, ROOT, Folder, blocks, folder
from verification.places import free_port

pytestmark = pytest.mark.timeout(LIMIT_S)

PAGE = "docs/tutorial.md"
TEXT = (ROOT / PAGE).read_text()
PROGRAMS = blocks("python", PAGE)
SHOWN = "\n".join(blocks("console", PAGE))
MAKE_VIDEO, RECEIVE, SEND, MESSAGES, ENGINE, ASK, SERVER, WITH_PERMIT, UPLOAD, LOGGING, METRICS = PROGRAMS
ROUTE = "@app.post"
READY = "the engine is ready\n"


class Site(Folder):
    """The folder of the reader, with the programs of all steps up to the server."""

    port: int
    engine: subprocess.Popen[str]

    def start_engine(self) -> None:
        """Start the engine, and wait until it says that it is ready."""
        self.engine = self.start("engine.py")
        assert self.engine.stdout is not None
        line = self.engine.stdout.readline()
        while line.startswith(("INFO:", "DEBUG:")):
            line = self.engine.stdout.readline()
        assert line == READY

    def start_server(self) -> subprocess.Popen[str]:
        """Start the server, and wait until it accepts connections."""
        server = self.start("-m", "uvicorn", "server:app", f"--port={self.port}")
        assert server.stdout is not None
        printed = ""
        while "Uvicorn running" not in printed:
            line = server.stdout.readline()
            assert line, printed
            printed += line
        return server

    def request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, str]:
        """Send a request, and return the status and the text of its response."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def upload(self) -> tuple[int, str]:
        """Upload the video, as curl does on the page."""
        return self.request("POST", "/videos", (self.path / "video.mp4").read_bytes())


@pytest.fixture
def site() -> Iterator[Site]:
    with folder(Site) as made:
        made.port = free_port()
        made.save("make_video.py", MAKE_VIDEO)
        made.save("messages.py", MESSAGES)
        made.save("engine.py", ENGINE)
        made.save("server.py", SERVER)
        made.save("upload.py", UPLOAD.replace(":8000/", f":{made.port}/"))
        made.run("make_video.py")
        yield made


def with_permit(server: str) -> str:
    """Replace the last function of the server, and import `Permit`, as the page asks for."""
    [imported] = re.findall(r"`(from aiotensor.channel import .*, Permit)`", TEXT)
    return re.sub(r"from aiotensor.channel import .*", imported, server.split(ROUTE)[0]) + WITH_PERMIT


def with_slow_model(engine: str) -> str:
    """Return the engine with the change that makes its model work for a second."""
    assert "`time.sleep(1)` as the first line of\n`model`" in TEXT
    return "import time\n" + engine.replace("def model(video):\n", "def model(video):\n    time.sleep(1)\n")


def test_a_tensor_arrives_in_the_other_process() -> None:
    with folder(Folder) as made:
        made.save("receive.py", RECEIVE)
        made.save("send.py", SEND)
        receiver = made.start("receive.py")
        sent = made.run("send.py")
        received, _ = receiver.communicate(timeout=LIMIT_S)
    assert receiver.returncode == 0
    assert f"$ python receive.py\n{received}" in SHOWN
    assert f"$ python send.py\n{sent}" in SHOWN


def test_the_engine_answers_a_request_with_the_scenes_of_the_video(site: Site) -> None:
    site.save("ask.py", ASK)
    site.start_engine()
    assert f"$ python ask.py video.mp4\n{site.run('ask.py', 'video.mp4')}" in SHOWN


def test_the_server_answers_an_upload_and_survives_a_restart_of_the_engine(site: Site) -> None:
    site.start_engine()
    site.start_server()
    status, text = site.upload()
    assert (status, f"{text}\n" in SHOWN) == (200, True)
    assert site.request("POST", "/videos", b"no video") == (400, '{"detail":"the body is not a video"}')

    site.engine.kill()
    site.engine.wait()
    status, text = site.upload()
    assert (status, f"{text}\n" in SHOWN) == (503, True), text

    site.start_engine()
    assert site.upload()[0] == 200


def test_uploads_beyond_the_permits_wait_and_are_answered_with_503(site: Site) -> None:
    site.save("engine.py", with_slow_model(ENGINE))
    site.save("server.py", with_permit(SERVER))
    site.start_engine()
    site.start_server()
    printed = site.run("upload.py", "20")
    numbers = {status: int(number) for number, status in re.findall(r"(\d+) uploads .* with (\d+)", printed)}
    assert numbers.keys() == {"200", "503"}, printed
    assert sum(numbers.values()) == 20
    assert numbers["200"] >= 2


def test_metrics_logs_and_top_show_the_engine_and_its_server(site: Site) -> None:
    site.save("engine.py", ENGINE.replace("\n\n\ndef model", f"\n\n{LOGGING}\n\ndef model"))
    site.save("server.py", with_permit(SERVER) + METRICS)
    site.start_engine()
    server = site.start_server()
    assert site.upload()[0] == 200
    _, metrics = site.request("GET", "/metrics")
    limits = re.findall(r"^aiotensor_sender_permits_limit\{.*\} (.*)$", metrics, re.MULTILINE)
    assert [float(limit) for limit in limits] == [2]
    assert re.search(r"^aiotensor_sender_permits_in_use\{.*\} 0.0$", metrics, re.MULTILINE)

    [command] = re.findall(r"^\$ aiotensor (\S+) engine:///tmp/tutorial-\$\(id -u\)$", SHOWN, re.MULTILINE)
    shown = json.loads(
        site.run("-m", "aiotensor", command, f"engine://{site.path}/tutorial-{os.getuid()}", "--json")
    )
    assert [sender["pid"] for sender in shown["senders"]] == [server.pid]

    server.terminate()
    server.wait()
    site.engine.send_signal(signal.SIGINT)
    output, _ = site.engine.communicate(timeout=LIMIT_S)
    assert "INFO:aiotensor.channel:" in output
