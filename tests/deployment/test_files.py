"""The files in `deploy` start the example programs, and the tools that read them accept them."""

import re
import shutil
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.deployment.composition import services_of
from tests.deployment.containers import ROOT, container
from tests.examples.films import film, is_right
from verification.places import free_port

DEPLOY = ROOT / "deploy"
COMPOSITIONS = ["compose.yaml", "compose.two-hosts.yaml"]
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
RELEASES = ["1.29", "1.33"]  # of Kubernetes

pytestmark = pytest.mark.extended


@pytest.mark.asyncio(loop_factories=["asyncio"])  # of the test; the programs have their own
async def test_the_compose_file_for_one_machine_serves_uploads(folder: Path) -> None:
    film(folder / "film.mkv", 200)  # its frames are larger than /dev/shm
    services = services_of("compose.yaml")
    specs = {name: service.spec(folder) for name, service in services.items()}
    # The containers of this test share the network of the machine.
    port = str(free_port())
    [published] = services["api"].definition["ports"]
    assert published in {f"127.0.0.1:{word}:{word}" for word in specs["api"].command}
    command = [port if published.endswith(f":{word}") else word for word in specs["api"].command]
    specs["api"] = msgspec.structs.replace(specs["api"], command=command)
    specs["engine"].environment["METRICS_PORT"] = str(free_port())
    async with AsyncExitStack() as stack:
        started = {name: await stack.enter_async_context(container(spec)) for name, spec in specs.items()}
        await started["engine"].says("the engine is ready")
        transport = httpx.AsyncHTTPTransport(retries=100)
        url = f"http://127.0.0.1:{port}/videos"
        http = httpx.AsyncClient(transport=transport, timeout=60, trust_env=False)
        await stack.enter_async_context(http)
        await started["api"].says("Uvicorn running")
        answer = await http.post(url, content=(folder / "film.mkv").read_bytes())
        assert answer.status_code == 200, answer.text
        assert is_right(folder / "film.mkv", answer.json())
        for name in ("api", "engine"):  # in the order of `depends_on`
            assert await started[name].stop(services[name].grace_s) == 0, started[name].printed


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_compose_accepts_a_file(name: str) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True).returncode != 0:
        pytest.skip("the plugin `compose` of Docker is not installed")
    command = [docker, "compose", "--file", str(DEPLOY / name), "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_has_the_fields_of_the_schemas_of_kubernetes(manifest: Path) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="`kubernetes-validate` is not installed")
    for resource in manifest.read_text().split("\n---\n"):
        for release in RELEASES:
            validator.validate(msgspec.yaml.decode(resource), release, strict=True)


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_systemd_accepts_a_unit(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("`systemd-analyze` is not installed: it belongs to systemd")
    for one in UNITS:  # at their paths, no program is installed here
        text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", one.read_text(), flags=re.MULTILINE)
        (tmp_path / one.name).write_text(text)
    command = ["systemd-analyze", "verify", str(tmp_path / unit.name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not [line for line in done.stderr.splitlines() if unit.name in line]
