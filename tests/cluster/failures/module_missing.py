# submit: -N 2 --ntasks-per-node 2
# cause: python-module-missing
# rank: 2
# host: 1
# line: No module named 'tensorboardx'
# fix: pip install tensorboardx
import os
import time

if os.environ["RANK"] != "2":
    time.sleep(600)  # until the job is ended because of rank 2
import tensorboardx  # noqa: F401
