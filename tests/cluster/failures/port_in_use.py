# submit: -N 2 --ntasks-per-node 2
# cause: port-in-use
# rank: 1
# host: 0
# line: Address already in use
import os
import time

if os.environ["RANK"] != "1":
    time.sleep(600)  # until the job is ended because of rank 1
import socket

first = socket.create_server(("", 0))
socket.create_server(("", first.getsockname()[1]))
