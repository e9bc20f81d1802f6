"""``python monitor.pyz RUN_DIR JOB_ID INTERVAL_S``: samples into RUN_DIR until SIGTERM, or until the job is over."""

import os
import sys


def main() -> int:
    if len(sys.argv) != 4:
        sys.exit("usage: python monitor.pyz RUN_DIR JOB_ID INTERVAL_S")
    from hpcjobs.node.monitor.sampler import watch

    return watch(sys.argv[1], sys.argv[2], float(sys.argv[3]), os.environ)


if __name__ == "__main__":
    sys.exit(main())
