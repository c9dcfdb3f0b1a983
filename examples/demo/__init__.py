"""The demo application: it uploads real videos over HTTP to a server that sends their frames to an engine.

    this process            workers of the API server          engine process
    ------------            -------------------------          --------------
    uploads.py  --HTTP-->   server.py  videos.py  decode.py
                            MessageClient  ---- request --------->  MessageServer
                                                                    engine.py  scene.py
    report.py   <--HTTP--   MessageClient  <--- answer -----------  MessageServer
    workers.py  <--JSON---  workers.py

A request contains its tensors, and the engine receives it with the tensors in their places: the frames are
decoded into shared memory, and the rest of the request travels over a socket.

`command.py` defines the options. `run.py` does a whole run: `processes.py` starts and stops the engine and
uvicorn, which starts the workers. `settings.py` configures the workers, and `messages.py` defines all records
that are sent between processes.

The demo is a package in the folder of the examples, so `examples` must be on the path: start it with
``make demo``, or with ``PYTHONPATH=examples python -m demo``.
"""
