"""One rank of several runs, one after the other in the same process: torch is loaded once for all."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from hpcjobs import trainers


def main() -> int:
    worst = 0
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        os.environ["MASTER_PORT"], os.environ["HPCJOBS_RUN_DIR"] = job["port"], job["folder"]
        worst = max(worst, trainers.run(job["trainer"], job["flags"]))
    return worst


if __name__ == "__main__":
    sys.exit(main())
