"""An engine and an API server on two machines, which may also be two containers or one machine.

    api.py                                          engine.py
    ------                                          ---------
    MessageClient  --- request with frames ---->    MessageServer, port 7000
                   <-- answer -----------------

`keys.py` reads the keys by which both sides authenticate each other. `messages.py` defines the request and
the answer. `README.md` shows how to run them on two machines or in containers.

On one machine, in the folder `examples`:

python -m aiotensor keys two_hosts/keys
python -m two_hosts.engine two_hosts/keys/engine.json &
python -m two_hosts.api two_hosts/keys/api.json
"""
