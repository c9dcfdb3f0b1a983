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

__all__ = ["Composition", "Service"]

DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()

# The containers of `tests.deployment.containers` always have these restrictions.
RESTRICTIONS = {"read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"]}


@dataclass(frozen=True)
class Service:
    """A service of a compose file.

    Attributes:
        definition: its definition in the file, with all defaults and variables.
        folder: the folder of the file, to which paths are relative.
        secrets: the files of the secrets by their names.
    """

    definition: dict[str, Any]
    folder: Path
    secrets: dict[str, str]

    @property
    def grace_s(self) -> float:
        """The time after which a container runtime kills it."""
        return float(self.definition["stop_grace_period"].removesuffix("s"))

    def spec(self, volumes: Path, host: Host | None = None, secrets: Path | None = None) -> Spec:
        """Return its container.

        Args:
            volumes: the folder with a folder for each volume.
            host: its network.
            secrets: the folder with the files of the secrets, instead of the folder in the compose file.
        """
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


class Composition:
    """A compose file.

    Args:
        name: the name of the file in `deploy`.
        variables: the variables of the environment that it uses.
    """

    def __init__(self, name: str, **variables: str) -> None:
        path = ROOT / "deploy" / name
        text = re.sub(
            r"\$\{(\w+):-([^}]*)\}", lambda found: variables.get(found[1], found[2]), path.read_text()
        )
        self.content: dict[str, Any] = msgspec.yaml.decode(text)
        secrets = {key: one["file"] for key, one in self.content.get("secrets", {}).items()}
        self.services = {
            key: Service(definition, path.parent, secrets)
            for key, definition in self.content["services"].items()
        }


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
