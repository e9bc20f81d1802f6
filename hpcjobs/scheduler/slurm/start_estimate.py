"""When a job would start, as Slurm's own scheduler estimates it: ``sbatch --test-only`` submits nothing."""

from __future__ import annotations

import re
import time

_EXPECTED_START = re.compile(r"\bstart(?:s|ing)?(?: ?time)?(?:[:=]| at| is)\s*(\S+?)[,.;]?(?:\s|$)", re.IGNORECASE)


def parse_test_only(text: str) -> float | None:
    """Seconds since 1970 from what ``sbatch --test-only`` printed; None: it has no estimate.

    The line is ``sbatch: Job 7 to start at TIME using ...`` on standard error. TIME is in seconds with
    SLURM_TIME_FORMAT=%s, local time where a version ignores that.
    """
    for expected in _EXPECTED_START.findall(text):
        if expected.isdigit():
            return float(expected)
        try:
            return time.mktime(time.strptime(expected, "%Y-%m-%dT%H:%M:%S"))
        except ValueError:
            continue
    return None
