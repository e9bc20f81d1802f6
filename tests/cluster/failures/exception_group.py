# submit: -N 2 --ntasks-per-node 1
# cause: python-error
# rank: 1
# host: 1
# line: ValueError: bad record 12
import os
import time

if os.environ["RANK"] != "1":
    time.sleep(600)  # until the job is ended because of rank 1
raise ExceptionGroup("unhandled errors in a TaskGroup", [ValueError("bad record 12")])  # noqa: F821 (Python 3.11)
