"""The files in `deploy` are valid, agree with each other, and start the example programs."""

import re
import shlex
import shutil
import subprocess
import tomllib
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.deployment.composition import DOCKERFILE, RESTRICTIONS, Composition, image_environment, image_user
from tests.deployment.containers import ROOT, container
from tests.examples.films import film, is_right
from verification.places import free_port

DEPLOY = ROOT / "deploy"
COMPOSITIONS = ["compose.yaml", "compose.two-hosts.yaml"]
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
RELEASES = ["1.29", "1.33"]  # of Kubernetes


def resources(manifest: Path) -> list[dict[str, Any]]:
    """Return the resources of a manifest."""
    return [msgspec.yaml.decode(part) for part in manifest.read_text().split("\n---\n")]


def pods(manifest: Path) -> list[dict[str, Any]]:
    """Return the specifications of the pods of a manifest."""
    return [one["spec"]["template"]["spec"] for one in resources(manifest) if "template" in one["spec"]]


def programs(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the containers of a pod by their names, including sidecars."""
    return {one["name"]: one for one in (*pod.get("initContainers", ()), *pod["containers"])}


def test_the_image_copies_files_that_exist_and_installs_extras_that_exist() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for name in (word for line in copied for word in line.split()):
        assert (ROOT / name).exists(), name
        assert f"!{name}" in ignored, name
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [extras] = re.findall(r"\.whl\)\[([\w,]+)\]", DOCKERFILE)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert f"--uid {image_user()} " in DOCKERFILE


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_services_of_a_compose_file_have_restrictions_limits_and_time_to_stop(name: str) -> None:
    composition = Composition(name)
    for service in composition.services.values():
        definition = service.definition
        assert RESTRICTIONS.items() <= definition.items()
        assert definition["mem_limit"]
        assert (
            ROOT / "deploy" / definition["build"]["context"] / definition["build"]["dockerfile"]
        ).is_file()
        command = shlex.split(definition["command"])
        if "--timeout-graceful-shutdown" in command:
            assert service.grace_s > int(command[command.index("--timeout-graceful-shutdown") + 1])
        declared = composition.content
        assert {volume.split(":")[0] for volume in definition.get("volumes", ())} <= set(declared["volumes"])
        assert set(definition.get("networks", ())) <= set(declared.get("networks", ()))
        assert set(definition.get("secrets", ())) <= set(declared.get("secrets", ()))


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_compose_accepts_a_file(name: str) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True).returncode != 0:
        pytest.skip("the plugin `compose` of Docker is not installed")
    command = [docker, "compose", "--file", str(DEPLOY / name), "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("needs_containers")
@pytest.mark.asyncio(loop_factories=["asyncio"])  # of the test; the programs have their own
async def test_the_compose_file_for_one_machine_serves_uploads(folder: Path) -> None:
    film(folder / "film.mkv", 40, height=180, width=320)
    services = Composition("compose.yaml").services
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
        url = f"http://127.0.0.1:{port}"
        transport = httpx.AsyncHTTPTransport(retries=100)
        http = httpx.AsyncClient(base_url=url, transport=transport, timeout=60, trust_env=False)
        await stack.enter_async_context(http)
        await started["api"].says("Uvicorn running")
        answer = await http.post("/videos", content=(folder / "film.mkv").read_bytes())
        assert answer.status_code == 200, answer.text
        assert is_right(folder / "film.mkv", answer.json())
        for name in ("api", "engine"):  # in the order of `depends_on`
            assert await started[name].stop(services[name].grace_s) == 0, started[name].printed


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_has_the_fields_of_the_schemas_of_kubernetes(manifest: Path) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="`kubernetes-validate` is not installed")
    for release in RELEASES:
        for resource in resources(manifest):
            validator.validate(resource, release, strict=True)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_pods_are_restricted_and_both_sides_agree(manifest: Path) -> None:
    found = {name: (pod, one) for pod in pods(manifest) for name, one in programs(pod).items()}
    assert set(found) == {"api", "engine"}
    commands = {
        name: service.definition["command"] for name, service in Composition(COMPOSITIONS[0]).services.items()
    }
    for name, (pod, one) in found.items():
        assert pod["securityContext"] == {
            "runAsNonRoot": True,
            **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), image_user()),
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in one["resources"]["limits"]
        assert one["command"] == shlex.split(commands[name])
        assert {mount["name"] for mount in one["volumeMounts"]} <= {
            volume["name"] for volume in pod["volumes"]
        }
        ports = {port["name"] for port in one["ports"]}
        probes = [one[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness")]
        assert all(probe["port"] in ports for probe in probes)
    for resource in resources(manifest):
        if resource["kind"] == "Service":
            selected = resource["spec"]["selector"].items()
            labels = [
                one["spec"]["template"]["metadata"]["labels"]
                for one in resources(manifest)
                if "template" in one["spec"]
            ]
            assert any(selected <= label.items() for label in labels)
    variables = {
        name: {one["name"]: one["value"] for one in value.get("env", ())}
        for name, (_, value) in found.items()
    }
    places = {name: {one["mountPath"] for one in value["volumeMounts"]} for name, (_, value) in found.items()}
    if "ENGINE" in variables["api"]:
        assert (
            variables["api"]["ENGINE"].rpartition(":")[2] == variables["engine"]["ENGINE"].rpartition(":")[2]
        )
        assert all("/run/secrets/aiotensor" in mounted for mounted in places.values())
    else:
        folder = image_environment()["XDG_RUNTIME_DIR"]
        assert all(folder in mounted for mounted in places.values())


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_systemd_accepts_a_unit(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("`systemd-analyze` is not installed: it belongs to systemd")
    for one in UNITS:  # at their paths, no program is installed here
        text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", one.read_text(), flags=re.MULTILINE)
        (tmp_path / one.name).write_text(text)
    command = ["systemd-analyze", "verify", str(tmp_path / unit.name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    ours = [line for line in done.stderr.splitlines() if unit.name in line]
    assert done.returncode == 0, done.stderr
    assert not ours


def test_the_units_start_the_same_programs_as_the_image_at_the_published_addresses() -> None:
    commands = set()
    for service in Composition(COMPOSITIONS[0]).services.values():
        [host] = {port.split(":")[0] for port in service.definition.get("ports", ())} or {""}
        commands.add(service.definition["command"].replace("--host 0.0.0.0", f"--host {host}"))
    started = set()
    for unit in UNITS:
        [program] = re.findall(r"^ExecStart=\S*/(\w+ .*)$", unit.read_text(), re.MULTILINE)
        started.add(program)
    assert started == commands
