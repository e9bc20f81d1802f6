# submit: -N 2 --ntasks-per-node 1
# cause: python-error
# rank: 1
# host: 1
# line: LookupError: no label of image 12
"""Rank 1 raises an exception and hangs in its exit; rank 0 is aborted by its watchdog."""

import atexit
import os
import time

if os.environ["RANK"] == "1":
    atexit.register(time.sleep, 600)
    open("exception_before_abort.failed", "w").close()
    raise LookupError("no label of image 12")
while not os.path.exists("exception_before_abort.failed"):
    time.sleep(0.05)
time.sleep(2)  # until the other rank has printed its traceback
os.abort()
