# submit: -N 2 --ntasks-per-node 2
# cause: python-error
# rank: 1
# host: 0
# line: BatchMismatch: 12 is not divisible by 8
import os
import time

if os.environ["RANK"] != "1":
    time.sleep(600)  # until the job is ended because of rank 1


class BatchMismatch(Exception): ...


raise BatchMismatch("12 is not divisible by 8")
