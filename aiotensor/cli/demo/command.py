"""The options of `aiotensor demo`. Imports what the demo needs only once it runs."""

from pathlib import Path

import click

from aiotensor.cli.demo.clips import ClipsMissingError, sample_clips
from aiotensor.cli.extras import missing_extra

__all__ = ["demo"]

NEEDED = ["av", "fastapi", "httpx", "python_multipart", "rich", "uvicorn", "uvloop"]
WORKERS = 2


@click.command()
@click.argument(
    "clips", nargs=-1, type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)
)
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    default=12,
    show_default=True,
    help="Uploads in all. The clips take turns; each is uploaded at least once.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Uploads on their way at once.",
)
@click.option(
    "--max-concurrent-videos",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Videos that each worker decodes or has on their way to the engine at once. Others wait.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help=f"Worker processes of the API server.  [default: {WORKERS}, or 1 with --link queue]",
)
@click.option(
    "--link",
    type=click.Choice(["unix", "queue"]),
    default="unix",
    show_default=True,
    help="How the workers reach the engine: by the path of a socket, or by a queue that is handed to one "
    "child process.",
)
def demo(
    clips: tuple[Path, ...],
    requests: int,
    concurrency: int,
    max_concurrent_videos: int,
    workers: int | None,
    link: str,
) -> None:
    """Upload videos to a server that hands them to an engine process.

    CLIPS are video files of your own. Without them the demo takes three short clips that come with
    its dependencies.

    Starts an API server (FastAPI on uvicorn, with several workers) and an engine (a small torch model
    that finds scene cuts), uploads the clips, and shows what was found and how long it took. The last
    line of standard output is one JSON object. The exit status is 1 if a video was lost, or arrived
    changed.
    """
    if sentence := missing_extra("aiotensor demo", NEEDED, extra="demo"):
        raise click.ClickException(sentence)
    if link == "queue" and workers not in (None, 1):
        raise click.UsageError(
            f"--link queue serves one worker, not {workers}: a queue can only be handed to a child of this "
            "process, and uvicorn's workers are none. Leave --workers out, or use --link unix"
        )
    try:
        from aiotensor.cli.demo.run import Options, run_demo

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
    except KeyboardInterrupt:  # before the run could take charge of Ctrl-C
        status = 130
    raise SystemExit(status)
