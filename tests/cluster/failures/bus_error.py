# submit: -N 2
# cause: bus-error
# rank: 1
# host: 1
# signal: 7
# certain: no
import os
import time

if os.environ["RANK"] != "1":
    time.sleep(600)  # until the job is ended because of rank 1
import mmap

with open("/tmp/hpcjobs-cut-short", "w+b") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
    file.truncate(0)
    memory[0]
