"""`aiotensor demo`: real videos from an HTTP upload to an answer, in several processes.

    this process            workers of the API server          engine process
    ------------            -------------------------          --------------
    uploads.py  --HTTP-->   server.py  videos.py  decode.py
                            TensorSender    ======= tensors =======>  TensorReceiver
                            engine_client.py  --- handles, ZeroMQ -->  engine.py  scene.py
    report.py   <--HTTP--   server.py         <-- answer, ZeroMQ ----  engine.py
    workers.py  <--JSON---  workers.py

`run.py` holds the whole run, `processes.py` starts and ends the engine and uvicorn, which starts the
workers; `settings.py` is what they are told, `messages.py` has every record that crosses a process border.
"""
