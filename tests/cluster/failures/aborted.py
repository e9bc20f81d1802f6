# submit: -N 2 --ntasks-per-node 2
# cause: aborted
# rank: 1
# host: 0
# signal: 6
import os
import time

if os.environ["RANK"] != "1":
    time.sleep(600)  # until the job is ended because of rank 1
os.abort()
