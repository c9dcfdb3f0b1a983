"""The API server: it produces videos, sends them to the engine, and prints the answers.

python -m two_hosts.api two_hosts/keys/api.json

A real server would decode uploads; examples/fastapi_server.py does, and needs the same arguments to reach an
engine on another machine.
"""

import argparse
import asyncio
import sys

import torch

from aiotensor import AioTensorError, MessageClient
from two_hosts.keys import ApiKeys, read
from two_hosts.messages import PORT, Summary, Video

SHAPE = (60, 360, 640, 3)  # 41 MB
VIDEOS_AT_ONCE = 4
MAX_WAIT_S = 60.0  # for an engine, a permit, or memory


def decode(number: int, frames: torch.Tensor) -> None:
    """Write the frames of a video: they become brighter from frame to frame."""
    for index, frame in enumerate(frames):
        frame.fill_((number + index) % 256)


async def ask(number: int, client: MessageClient[Summary]) -> Summary:
    """Send one video to the engine, and return its answer."""
    async with client.permit() as permit:
        frames = await permit.allocate(SHAPE, torch.uint8)  # from here the network reads them
        await asyncio.to_thread(decode, number, frames)
        # The model may see a video twice: if the engine is lost with it, the next engine gets it.
        return await client.request(Video(frames), inside=permit, idempotent=True)


async def main(host: str, port: int, keys: ApiKeys, videos: int) -> int:
    """Print the answer for each video, and return the number of videos that failed."""
    failed = 0
    async with MessageClient(
        f"tcp://{host}:{port}",
        Summary,
        max_concurrent_videos=VIDEOS_AT_ONCE,
        max_wait_s=MAX_WAIT_S,
        secret_key=keys.secret_key,
        server_key=keys.server_key,
    ) as client:

        async def process(number: int) -> None:
            nonlocal failed
            try:
                answer = await ask(number, client)
            except AioTensorError as error:
                print(f"video {number}: {error}", file=sys.stderr)
                failed += 1
            else:
                print(f"video {number}: {answer.frames} frames, brightness {answer.brightness:.1f}")

        async with asyncio.TaskGroup() as group:
            for number in range(videos):
                group.create_task(process(number))
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="two_hosts.api")
    parser.add_argument("keys", help="the file api.json")
    parser.add_argument("--engine", default="127.0.0.1", help="the host of the engine")
    parser.add_argument("--port", type=int, default=PORT, help="the port of the engine")
    parser.add_argument("--videos", type=int, default=8, help="the number of videos")
    given = parser.parse_args()
    failures = asyncio.run(main(given.engine, given.port, read(given.keys, ApiKeys), given.videos))
    raise SystemExit(min(failures, 1))
