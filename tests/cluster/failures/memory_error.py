# submit: -N 2 --ntasks-per-node 2 --mem 1G
# cause: out-of-memory
# rank: 2
# host: 1
# line: MemoryError
# fix: --mem 2048M
import os
import time

if os.environ["RANK"] != "2":
    time.sleep(600)  # until the job is ended because of rank 2
import resource

resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))
bytearray(1 << 30)
