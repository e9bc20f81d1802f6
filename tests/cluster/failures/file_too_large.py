# submit: -N 1
# cause: file-too-large
# rank: 0
# host: 0
# line: File too large
import resource

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
with open("/tmp/hpcjobs-large", "wb") as file:
    file.write(bytes(1 << 20))
