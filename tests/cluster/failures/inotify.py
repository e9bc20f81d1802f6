# submit: -N 1 --ntasks-per-node 1
# cause: inotify-limit
# rank: 0
# host: 0
# line: inotify watch limit reached
import errno

raise OSError(errno.ENOSPC, "inotify watch limit reached")
