"""`aiotensor demo`: real videos from an HTTP upload to an answer, in three processes.

    this process            API server process                  engine process
    ------------            ------------------                  --------------
    uploads.py  --HTTP-->   server.py  decode.py
                            TensorSender    ======= tensors =======>  TensorReceiver
                            engine_client.py  --- handles, ZeroMQ -->  engine.py  scene.py
    report.py   <--HTTP--   server.py         <-- answer, ZeroMQ ----  engine.py

`run.py` holds the whole run, `processes.py` starts and ends the two children, `messages.py` has
every record that crosses a process border.
"""
