# submit: -N 1
# cause: too-many-files
# rank: 0
# host: 0
# line: Too many open files
import os
import resource

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
files = [os.open("/dev/null", os.O_RDONLY) for _ in range(100)]
