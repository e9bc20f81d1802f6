# submit: -N 2
# cause: shared-library-missing
# rank: 1
# host: 1
# line: libcudart.so.99
import os
import time

if os.environ["RANK"] != "1":
    time.sleep(600)  # until the job is ended because of rank 1
import ctypes

ctypes.CDLL("libcudart.so.99")
