"""One cell of a sweep over a Python function: call it, and leave its result or its traceback in the run folder.

Run by each task. HPCJOBS_SWEEP names the folder that holds the pickled function, HPCJOBS_ARGUMENTS has the cell's
keywords. The current folder comes first in ``sys.path``, for the function's module. Rank 0 writes

    result.pkl     the return value of the function
    summary.json   the same, if it is a number, text, or a mapping of such
    error.txt      the traceback, if it raised
"""

from __future__ import annotations

import base64
import os
import pickle
import sys
import traceback
from pathlib import Path

from hpcjobs.files import write_beside
from hpcjobs.record import SUMMARY
from hpcjobs.record.values import encode_object


def main() -> int:
    """The cell's exit code: 1 if the function raised."""
    run_dir = Path(os.environ["HPCJOBS_RUN_DIR"])
    first = os.environ.get("RANK", "0") == "0"
    if first:
        (run_dir / "error.txt").unlink(missing_ok=True)
    sys.path.insert(0, os.getcwd())
    try:
        with open(os.path.join(os.environ["HPCJOBS_SWEEP"], "function.pkl"), "rb") as file:
            function = pickle.load(file)
        result = function(**pickle.loads(base64.b64decode(os.environ["HPCJOBS_ARGUMENTS"])))
        if first:
            _keep(run_dir, result)
    except Exception:
        error_text = traceback.format_exc()
        print(error_text, file=sys.stderr, flush=True)
        if first:
            write_beside(run_dir / "error.txt", error_text.encode("utf-8", "backslashreplace"), mode=None)
        return 1
    return 0


def _keep(run_dir: Path, result: object) -> None:
    write_beside(run_dir / "result.pkl", pickle.dumps(result), mode=None)
    summary = result if isinstance(result, dict) else {"result": result}
    try:
        text = encode_object(summary)
    except (TypeError, ValueError, RecursionError):
        return  # no JSON: the pickle has it
    if not (run_dir / SUMMARY).exists() or isinstance(result, dict):
        write_beside(run_dir / SUMMARY, text.encode(), mode=None)


if __name__ == "__main__":
    sys.exit(main())
