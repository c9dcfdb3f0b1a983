"""The wheel and the source distribution: their content, their metadata, and equal bytes from two builds."""

import email
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import aiotensor

ROOT = Path(__file__).parents[1]
WHEEL = f"aiotensor-{aiotensor.__version__}-py3-none-any.whl"
SDIST = f"aiotensor-{aiotensor.__version__}.tar.gz"

pytestmark = pytest.mark.extended

needs_environment = pytest.mark.skipif(
    "AIOTENSOR_TEST_PYTHON" not in os.environ, reason="`make test-all` makes an environment with the wheel"
)


def _build(source: Path, out: Path) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the distributions of this checkout."""
    out = tmp_path_factory.mktemp("dist")
    _build(ROOT, out)
    return out


@pytest.fixture(scope="module")
def metadata(built: Path) -> Message:
    """The metadata in the wheel."""
    with zipfile.ZipFile(built / WHEEL) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
        return email.message_from_bytes(wheel.read(name))


def test_a_build_elsewhere_with_other_times_and_modes_gives_the_same_bytes(
    built: Path, tmp_path: Path
) -> None:
    with tarfile.open(built / SDIST) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / SDIST.removesuffix(".tar.gz")
    for path in source.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o600)
        os.utime(path, (1, 1))

    _build(source, tmp_path / "again")

    for name in (WHEEL, SDIST):
        assert (tmp_path / "again" / name).read_bytes() == (built / name).read_bytes()


def test_the_wheel_contains_the_package_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(built / WHEEL) as wheel:
        packed = set(wheel.namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "aiotensor").rglob("*.py")}
    information = f"aiotensor-{aiotensor.__version__}.dist-info/"

    assert modules | {"aiotensor/py.typed"} == {name for name in packed if not name.startswith(information)}
    assert {f"{information}{name}" for name in ("METADATA", "entry_points.txt", "licenses/LICENSE")} < packed


def test_the_source_distribution_contains_what_its_tests_and_documents_need(built: Path) -> None:
    with tarfile.open(built / SDIST) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}

    for needed in (
        ".github/workflows/test.yml",
        ".pre-commit-config.yaml",
        "Makefile",
        "README.md",
        "constraints.txt",
        "deploy/compose.yaml",
        "docs/guide.md",
        "mkdocs.yml",
        "tests/conftest.py",
    ):
        assert needed in packed
    assert not [name for name in packed if "__pycache__" in name or name.startswith((".venv", "dist"))]


def test_the_links_of_the_description_on_the_package_index_are_absolute(metadata: Message) -> None:
    description = re.sub(r"```.*?```", "", str(metadata.get_payload()), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)]+)\)", description)

    assert len(links) > 10
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    for link in links:
        # A link to the repository names a file in it, at the tag of the release.
        if named := re.match(r"https://\w+[.\w]+/aiotensor/aiotensor/(?:blob/)?v([\d.]+)/([\w./-]+)", link):
            assert named[1] == aiotensor.__version__
            assert (ROOT / named[2]).exists(), link


def test_the_metadata_lists_the_tested_versions_of_python(metadata: Message) -> None:
    workflow = (ROOT / ".github/workflows/test.yml").read_text()
    classified = re.findall(r"Python :: (3\.\d+)", "\n".join(metadata.get_all("Classifier", [])))
    tested = re.search(r"python: \[(.*)\]", workflow)

    assert tested is not None
    assert re.findall(r"3\.\d+(?!\d*t)", tested[1]) == classified
    assert metadata["Requires-Python"] == f">={classified[0]}"


@needs_environment
def test_the_list_of_dependencies_names_the_package_and_no_path_of_the_builder() -> None:
    listed = (Path(os.environ["AIOTENSOR_TEST_PYTHON"]).parents[1] / "sbom.json").read_text()
    components = {one["name"]: one["version"] for one in json.loads(listed)["components"]}

    assert components["aiotensor"] == aiotensor.__version__
    assert {"torch", "pyzmq", "msgspec", "fastapi"} < set(components)
    assert "file:" not in listed


@needs_environment
def test_the_programs_of_the_documents_run_with_the_wheel_and_not_with_the_checkout(tmp_path: Path) -> None:
    code = "import aiotensor, importlib.metadata as m; print(aiotensor.__file__, m.version('aiotensor'))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [os.environ["AIOTENSOR_TEST_PYTHON"], "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    path, version = done.stdout.split()

    assert "site-packages" in path
    assert version == aiotensor.__version__
