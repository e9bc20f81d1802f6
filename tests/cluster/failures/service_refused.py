# submit: -N 2 --ntasks-per-node 1
# cause: service-unreachable
# rank: 1
# host: 1
# line: ConnectionRefusedError
# certain: no
import os
import socket
import time

if os.environ["RANK"] != "1":
    time.sleep(600)  # until the job is ended because of rank 1
with socket.socket() as closed:
    closed.bind(("127.0.0.1", 0))
    address = closed.getsockname()
socket.create_connection(address)
