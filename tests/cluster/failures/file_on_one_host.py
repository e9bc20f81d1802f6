# submit: -N 2 --ntasks-per-node 2
# cause: file-missing
# rank: 3
# host: 1
# line: /tmp/hpcjobs-data.bin
# fix: ls -l /tmp/hpcjobs-data.bin
import os
import time
from pathlib import Path

data = Path("/tmp/hpcjobs-data.bin")  # each host has a /tmp of its own
if os.environ["RANK"] == "0":
    data.write_bytes(b"data")
if os.environ["RANK"] != "3":
    time.sleep(600)
data.read_bytes()
