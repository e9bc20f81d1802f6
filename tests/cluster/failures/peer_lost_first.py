# submit: -N 2 --ntasks-per-node 1
# cause: python-error
# rank: 1
# host: 1
# line: AssertionError: 77 features
"""Rank 0 prints that it lost its peer before rank 1 prints why."""

import os
import time

if os.environ["RANK"] == "0":
    print("RuntimeError: [pair.cc:534] Connection closed by peer [10.2.0.33]:4018", flush=True)
    open("peer_lost_first.lost", "w").close()
    time.sleep(600)
while not os.path.exists("peer_lost_first.lost"):
    time.sleep(0.05)
raise AssertionError("77 features")
