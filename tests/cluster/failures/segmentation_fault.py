# submit: -N 2 --ntasks-per-node 2
# cause: segmentation-fault
# rank: 3
# host: 1
# signal: 11
import os
import time

if os.environ["RANK"] != "3":
    time.sleep(600)  # until the job is ended because of rank 3
import ctypes

ctypes.string_at(0)
