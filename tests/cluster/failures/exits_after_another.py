# submit: -N 2 --ntasks-per-node 1
# cause: file-missing
# rank: 1
# host: 1
# line: part-1.bin
# certain: no
"""Rank 1 fails first and takes long to exit; rank 0, which fails because of it, exits first."""

import atexit
import os
import time

if os.environ["RANK"] == "1":
    atexit.register(time.sleep, 600)
    open("exits_after_another.failed", "w").close()
    os.stat("part-1.bin")
while not os.path.exists("exits_after_another.failed"):
    time.sleep(0.05)
time.sleep(2)  # until the other rank has printed its traceback
raise ValueError("expected 2 parts and got 1")
