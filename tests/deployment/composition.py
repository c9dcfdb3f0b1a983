"""The services of a compose file as containers of `tests.deployment.containers`."""

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tests.deployment.containers import ROOT
from tests.deployment.inside import Spec
from verification.networks import Host

DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()

# The containers of `tests.deployment.containers` always have these restrictions.
RESTRICTIONS = {"read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"]}


@dataclass(frozen=True)
class Service:
    """A service of a compose file."""

    definition: dict[str, Any]
    folder: Path  # of the file, to which paths are relative
    secrets: dict[str, str]  # the files of the secrets by their names

    @property
    def grace_s(self) -> float:
        """The time after which a container runtime kills it."""
        return float(self.definition["stop_grace_period"].removesuffix("s"))

    def spec(self, volumes: Path, host: Host | None = None, secrets: Path | None = None) -> Spec:
        """Return its container, with volumes in one folder, and the files of the secrets in another one."""
        assert RESTRICTIONS.items() <= self.definition.items()
        user = int(self.definition.get("user", image_user()))
        mounts = {}
        for volume in self.definition.get("volumes", []):
            name, place = volume.split(":")
            path = volumes / name
            path.mkdir(exist_ok=True)
            os.chown(path, user, user)  # as a new volume gets the owner of the folder in the image
            mounts[place] = str(path)
        for name in self.definition.get("secrets", []):
            file = Path(self.secrets[name])
            mounts[f"/run/secrets/{name}"] = str(secrets / file.name if secrets else self.folder / file)
        return Spec(
            shlex.split(self.definition["command"]),
            str(working_folder()),
            image_environment() | self.definition.get("environment", {}),
            user,
            mounts,
            host,
        )


def services_of(name: str) -> dict[str, Service]:
    """Return the services of a compose file in `deploy`, with the defaults of its variables."""
    path = ROOT / "deploy" / name
    content = msgspec.yaml.decode(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", path.read_text()))
    secrets = {key: one["file"] for key, one in content.get("secrets", {}).items()}
    return {key: Service(one, path.parent, secrets) for key, one in content["services"].items()}


def image_environment() -> dict[str, str]:
    """Return the variables that the Dockerfile sets."""
    lines = re.findall(r"^ENV (.*)$", DOCKERFILE, re.MULTILINE)
    return dict(word.split("=", 1) for line in lines for word in shlex.split(line))


def image_user() -> int:
    """Return the user that the Dockerfile sets."""
    [user] = re.findall(r"^USER (\d+):\d+$", DOCKERFILE, re.MULTILINE)
    return int(user)


def working_folder() -> Path:
    """Return the folder of the repository that the Dockerfile copies to its working directory."""
    [place] = re.findall(r"^WORKDIR (.*)$", DOCKERFILE.split("\nFROM ")[-1], re.MULTILINE)
    [source] = re.findall(rf"^COPY (\S+) {place}$", DOCKERFILE, re.MULTILINE)
    return ROOT / str(source)
