# submit: -N 1 --ntasks-per-node 4
# cause: python-error
# rank: 3
# host: 0
# line: EOFError
import gzip
import io
import os
import time

if os.environ["RANK"] != "3":
    time.sleep(600)  # until the job is ended because of rank 3
gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(b"samples" * 100)[:20])).read()
