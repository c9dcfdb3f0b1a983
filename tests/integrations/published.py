"""The folder in which workers publish metrics: `prometheus_client` reads its name when it is imported."""

import os


def publish_to(folder: str) -> None:
    """Name the folder in this process, which has not imported `prometheus_client` yet."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
