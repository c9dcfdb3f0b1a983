"""The command line of the demo."""

from functools import partial
from pathlib import Path

import click

from demo.clips import ClipsMissingError, sample_clips

__all__ = ["demo"]

WORKERS = 2

_count = partial(click.option, type=click.IntRange(min=1), show_default=True)


@click.command()
@click.argument(
    "clips", nargs=-1, type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)
)
@_count(
    "--requests",
    default=12,
    help="Number of uploads. The clips take turns, and each is uploaded at least once.",
)
@_count("--concurrency", default=8, help="Number of concurrent uploads.")
@_count(
    "--max-concurrent-videos",
    default=3,
    help="Videos that each worker decodes or sends to the engine at once. Further videos wait.",
)
@_count(
    "--workers",
    help=f"Worker processes of the API server.  [default: {WORKERS}, or 1 with --link queue]",
)
@click.option(
    "--link",
    type=click.Choice(["unix", "queue"]),
    default="unix",
    show_default=True,
    help="Connect the workers to the engine by the path of a socket, or by a queue that one child process "
    "inherits.",
)
def demo(
    clips: tuple[Path, ...],
    requests: int,
    concurrency: int,
    max_concurrent_videos: int,
    workers: int | None,
    link: str,
) -> None:
    """Upload videos to a server that sends them to an engine process.

    CLIPS are your own video files. By default the demo uploads three short clips that are installed with
    its dependencies.

    Starts an API server (FastAPI on uvicorn, with several workers) and an engine (a small torch model
    that finds scene cuts), uploads the clips, and prints the cuts and the measured times. The last line of
    standard output is one JSON object. The exit status is 1 if a video was lost, or arrived changed.
    """
    if link == "queue" and workers not in (None, 1):
        raise click.UsageError(
            f"--link queue serves one worker, not {workers}: only a child of this process can inherit a "
            "queue, and uvicorn's workers are its grandchildren. Leave --workers out, or use --link unix"
        )
    try:
        from demo.run import Options, run_demo  # not at the top: importing torch would delay --help

        options = Options(
            clips=clips or sample_clips(),
            own_clips=bool(clips),
            requests=requests,
            concurrency=concurrency,
            max_concurrent_videos=max_concurrent_videos,
            workers=workers or (WORKERS if link == "unix" else 1),
            link=link,
        )
        status = run_demo(options)
    except ClipsMissingError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:  # before the signal handlers of the run were set
        status = 130
    raise SystemExit(status)
