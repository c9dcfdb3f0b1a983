"""Start real vLLM servers on this machine, send requests to them, and end them.

`bench/vllm_serve/setup.sh` installs vLLM, a model and videos in the folder that VLLM_SERVE_FOLDER names.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from bench.usage import family

FOLDER = Path(os.environ.get("VLLM_SERVE_FOLDER", ".")).absolute()  # which `setup.sh` made
_SHM = "/dev/shm"  # noqa: S108 - vLLM uses it
_START_S = 400.0
_END_S = 60.0

_ARGUMENTS = (
    str(FOLDER / "model"),
    *("--served-model-name", "tiny", "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"),
    *("--max-model-len", "8192", "--max-num-seqs", "8", "--max-num-batched-tokens", "8192"),
    *("--no-enable-prefix-caching", "--skip-mm-profiling", "--mm-processor-cache-gb", "0"),
    *("--media-io-kwargs", json.dumps({"video": {"num_frames": 64}}), "--disable-uvicorn-access-log"),
    *("--allowed-local-media-path", str(FOLDER / "videos"), "--api-server-count", "2"),
)
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_SIM_MULTI_NUMA": "0",  # otherwise, each engine needs its own memory node
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


class Server:
    """A running server.

    Attributes:
        url: the address of its HTTP interface.
        address: the value of ``AIOTENSOR_VLLM_ADDRESS``.
        process: its main process.
    """

    def __init__(self, folder: Path, arguments: Sequence[str], environment: dict[str, str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.address = f"unix://{folder}/engine.sock"
        self._folder = folder
        self._shm = set(os.listdir(_SHM))
        self._log = folder / "log"
        settings = {"TMPDIR": str(folder), "PYTHONPATH": str(FOLDER / "overlay")}
        if environment.get("AIOTENSOR_VLLM"):
            settings["AIOTENSOR_VLLM_ADDRESS"] = self.address
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [program("vllm"), "serve", *_ARGUMENTS, "--port", str(port), *arguments],
                env={"PATH": os.environ["PATH"], **_ENVIRONMENT, **settings, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Wait until the server answers."""
        end = time.monotonic() + _START_S
        while True:
            with suppress(httpx.TransportError):
                httpx.get(f"{self.url}/health", timeout=5).raise_for_status()
                return
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"vLLM has not started:\n{self.log()[-4000:]}")
            time.sleep(0.5)

    def log(self) -> str:
        """Return the output of all its processes."""
        return self._log.read_text(errors="replace")

    def processes(self) -> dict[int, str]:
        """Return the command lines of its processes by their ids."""
        found = {}
        for pid in family([self.process.pid]):
            with suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        return found

    def metric(self, name: str) -> float:
        """Return the sum of the values of a metric, over its labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=20).text.splitlines()
        values = [line.rpartition(" ")[2] for line in lines if line.split("{")[0].split(" ")[0] == name]
        return sum(map(float, values))

    def top(self, address: str) -> Any:
        """Return what `aiotensor top` shows for an address."""
        command = [program("aiotensor"), "top", "--json", "--patience", "5", address]
        return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)

    def end(self, sent: signal.Signals, title: str = "") -> list[str]:
        """End the server by a signal, and return what remains after its processes have ended.

        Args:
            sent: the signal.
            title: a part of the title of the process to which it is sent; the main process by default.
        """
        titles = self.processes()
        victims = [pid for pid, name in titles.items() if title in name]
        os.kill(victims[-1] if title else self.process.pid, sent)
        until(lambda: self.process.poll() is not None and not any(map(_is_alive, titles)), _END_S)
        # vLLM's workers on CPUs leave their own segments behind if they are killed.
        segments = [name for name in set(os.listdir(_SHM)) - self._shm if "-cpushm_" not in name]
        listening = Path("/proc/net/unix").read_text().splitlines()
        sockets = [line for line in listening if str(self._folder) in line]
        return [*segments, *map(str, self._folder.glob("*.sock")), *sockets]


def program(name: str) -> str:
    """Return the path of a program in the environment of vLLM."""
    return str(FOLDER / "venv/bin" / name)


@contextmanager
def running(*arguments: str, **environment: str) -> Iterator[Server]:
    """Start a server with arguments and environment variables, and stop it in the end."""
    with tempfile.TemporaryDirectory(prefix="serve-") as folder:
        server = Server(Path(folder), arguments, environment)
        try:
            server.wait_until_ready()
            yield server
        finally:
            if server.process.poll() is None:
                server.end(signal.SIGTERM)


async def ask(client: httpx.AsyncClient, number: int, tokens: int = 8) -> list[int]:
    """Ask about a video, and return the tokens of the answer."""
    content = [
        {"type": "video_url", "video_url": {"url": f"file://{FOLDER}/videos/{number}.mp4"}},
        {"type": "text", "text": f"Describe {number}."},
    ]
    request = {
        "model": "tiny",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = await client.post("/v1/chat/completions", json=request)
    response.raise_for_status()
    answer: list[int] = response.json()["choices"][0]["token_ids"]
    return answer


async def ask_all(server: Server, numbers: Sequence[int], tokens: int = 8) -> list[list[int]]:
    """Ask about videos at the same time, and return the answers."""
    async with client_of(server) as client:
        return await asyncio.gather(*(ask(client, number, tokens) for number in numbers))


def client_of(server: Server) -> httpx.AsyncClient:
    """Return an HTTP client, whose connections are spread over the API servers."""
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits)


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until a condition holds.

    Raises:
        TimeoutError: it does not hold within this time.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"the condition does not hold after {seconds} s")
        time.sleep(0.1)


def _is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
