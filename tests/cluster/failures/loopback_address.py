# submit: -N 2
# cause: loopback-address
# rank: 1
# host: 1
# line: 127.0.0.1
# env: MASTER_ADDR
import os
import time

if os.environ["RANK"] != "1":
    time.sleep(600)  # until the job is ended because of rank 1
from datetime import timedelta

from torch.distributed import init_process_group

os.environ["MASTER_ADDR"] = "127.0.0.1"  # as programs do that were made for one machine
init_process_group("gloo", timeout=timedelta(seconds=2))
