"""One rank of several runs, one after the other in the same process: torch is loaded once for all.

    several.py PLAN     a JSON list of {"trainer": NAME, "flags": [...], "folder": RUN_FOLDER}, "port" where ranks meet

Without a port, runs meet at the launcher's and the ones after it, or in torchrun's own store, one attempt each.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from hpcjobs import trainers


def main() -> int:
    first_port, worst = int(os.environ["MASTER_PORT"]), 0
    for number, run in enumerate(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))):
        os.environ["HPCJOBS_RUN_DIR"] = run["folder"]
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            os.environ["MASTER_PORT"] = str(run.get("port", first_port + number))
        code = trainers.run(run["trainer"], run["flags"])
        worst = max(worst, code)
    return worst


if __name__ == "__main__":
    sys.exit(main())
