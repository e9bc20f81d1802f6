# submit: -N 2 --ntasks-per-node 2
# cause: variable-missing
# rank: 3
# host: 1
# certain: no
# line: DATA_DIR
# fix: --env DATA_DIR=VALUE
import os
import time

if os.environ["RANK"] != "3":
    time.sleep(600)  # until the job is ended because of rank 3
os.environ["DATA_DIR"]
