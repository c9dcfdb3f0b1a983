"""`aiotensor demo`: real videos from an HTTP upload to an answer, in several processes.

    this process            workers of the API server          engine process
    ------------            -------------------------          --------------
    uploads.py  --HTTP-->   server.py  videos.py  decode.py
                            TensorSender   ======= frames =======>  TensorReceiver
                            MessageClient  --- request, ZeroMQ -->  MessageServer
                                                                    engine.py  scene.py
    report.py   <--HTTP--   MessageClient  <-- answer, ZeroMQ ----  MessageServer
    workers.py  <--JSON---  workers.py

A request holds its tensors, and the engine has them in their places: that the frames go another way than
the rest, through shared memory, is the business of the channel.

`run.py` holds the whole run, `processes.py` starts and ends the engine and uvicorn, which starts the
workers; `settings.py` is what they are told, `messages.py` has every record that crosses a process border.
"""
