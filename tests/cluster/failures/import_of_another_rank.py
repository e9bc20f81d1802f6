# submit: -N 2 --ntasks-per-node 2
# cause: python-import-failed
# rank: 3
# host: 1
# line: cannot import name
import os
import time

if os.environ["RANK"] != "3":
    time.sleep(600)  # until the job is ended because of rank 3
from os import no_such_name  # noqa: F401
