# submit: -N 2
# cause: permission-denied
# rank: 1
# host: 1
# line: /proc/sys/kernel/ngroups_max
# fix: ls -ld /proc/sys/kernel/ngroups_max
import os
import time

if os.environ["RANK"] != "1":
    time.sleep(600)  # until the job is ended because of rank 1
os.open("/proc/sys/kernel/ngroups_max", os.O_WRONLY)  # nobody may, root neither
