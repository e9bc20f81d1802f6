# submit: -N 2
# cause: host-unknown
# rank: 1
# host: 1
# line: gaierror
import os
import time

if os.environ["RANK"] != "1":
    time.sleep(600)  # until the job is ended because of rank 1
import socket

socket.create_connection((os.environ["MASTER_ADDR"] + "-ib", 15000))
