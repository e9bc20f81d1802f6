# submit: -N 2
# cause: rendezvous-timeout
# rank: 0
# host: 0
# fix: hpcjobs fabric
import os
import time

if os.environ["RANK"] != "0":
    time.sleep(600)  # until the job is ended because of rank 0
from datetime import timedelta

from torch.distributed import init_process_group

init_process_group("gloo", timeout=timedelta(seconds=2))  # rank 1 never comes
