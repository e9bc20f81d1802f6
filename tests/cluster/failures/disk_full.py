# submit: -N 2
# cause: disk-full
# rank: 1
# host: 1
# line: No space left on device
import os
import time

if os.environ["RANK"] != "1":
    time.sleep(600)  # until the job is ended because of rank 1
with open("/dev/full", "wb") as checkpoint:
    checkpoint.write(bytes(1 << 20))
