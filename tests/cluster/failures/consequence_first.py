# submit: -N 2 --ntasks-per-node 2
# cause: not-a-number
# rank: 2
# host: 1
# line: loss is nan
"""Rank 0 ends first, because rank 2 has closed its connection; rank 2 names the cause."""

import os
import time

if os.environ["RANK"] == "2":
    print("ValueError: loss is nan at step 7", flush=True)
    open("diverged", "w").close()
    time.sleep(600)
while os.environ["RANK"] != "0" or not os.path.exists("diverged"):
    time.sleep(0.05)
raise ConnectionResetError(104, "Connection reset by peer")
