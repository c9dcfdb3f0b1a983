"""A server in Ray Serve: its replicas decode uploads, and an actor owns the model.

python examples/ray_serve.py [PORT]
curl --data-binary @video.mp4 http://127.0.0.1:8000/videos

It needs `pip install 'aiotensor[fastapi,prometheus]' av 'ray[serve]'`.

- `serve.ingress` gets a function, because Ray Serve would otherwise pickle the application in the driver.
  `MessageLifespan` opens a client in each replica, and drains it when the replica stops.
- Each replica has its own permits: four replicas with `max_concurrent_videos=4` may have 16 videos in flight.
- The engine could also be a deployment of Ray Serve. Each of its replicas then needs its own address.
"""

import signal
import sys
from types import FrameType

import ray
from fastapi import FastAPI
from ray import serve

from addresses import ENGINE
from aiotensor import blocking
from engine import model
from messages import Batch

REPLICAS = 2


class Engine:
    """Owns the model. When its process dies, Ray starts it again, and the replicas connect to it."""

    def run(self) -> None:
        """Answer requests until the actor is killed."""
        with blocking.MessageServer(ENGINE, Batch) as server:
            server.serve(model)


def make_app() -> FastAPI:
    """Return the application; called in each replica, because a client cannot be pickled."""
    from fastapi_server import app

    return app


def main(port: int) -> None:
    """Serve until SIGINT or SIGTERM."""
    ray.init(include_dashboard=False)
    signal.signal(signal.SIGTERM, _interrupt)  # in place of the handler of Ray, which aborts the process
    try:
        engine = ray.remote(Engine).options(num_cpus=1, max_restarts=-1, max_task_retries=-1).remote()
        running = engine.run.remote()
        serve.start(http_options={"port": port})
        replica = serve.deployment(serve.ingress(make_app)())
        serve.run(replica.options(num_replicas=REPLICAS, ray_actor_options={"num_cpus": 0.5}).bind())
        print("the server is ready", flush=True)
        ray.get(running)  # raises the error of an engine that cannot run
    except KeyboardInterrupt:
        print("the server ends", flush=True)
    finally:
        serve.shutdown()  # the replicas first: they finish their requests
        ray.shutdown()


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8000)
