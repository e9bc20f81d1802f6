"""How verbs name the way in which a job ended."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from commandline import ok, within

from hpcjobs.scheduler.base import describe_signal

ENDINGS: list[tuple[dict[str, Any], str, str]] = [
    ({"state": "FAILED", "exit_code": 0, "signal": 9}, f", {describe_signal(9)}", "SIGKILL"),
    ({"state": "FAILED", "exit_code": 1, "signal": 6}, f", exit code 1, {describe_signal(6)}", "1 (SIGABRT)"),
    ({"state": "FAILED", "exit_code": 0, "signal": 99}, ", killed by signal 99", "signal 99"),
    ({"state": "FAILED", "exit_code": 3}, ", exit code 3", "3"),
    ({"state": "CANCELLED", "exit_code": 0}, "", "-"),
]
"""What the accounting has; how `show` and `wait` print it; what the column of `ps` has."""


def test_the_signal_that_ended_a_job_is_named_and_slurms_0_of_a_job_that_did_not_complete_is_not_shown(
    here: Path,
) -> None:
    ok("submit", "--site", "local", "--launcher", "spawn", "--wait", "true")
    (path,) = here.glob("runs/*/accounting.json")
    (record,) = json.loads(path.read_text(encoding="utf-8"))
    for facts, printed, column in ENDINGS:
        path.write_text(json.dumps([{**record, **facts, "max_rss_bytes": None}]), encoding="utf-8")
        assert f"for 0s{printed}\n" in ok("show", "L1").out
        waited = within("wait", "L1")
        assert waited.code != 0
        assert f"job L1 {facts['state']} on {os.uname().nodename}{printed}\n" in waited.err
        assert f"   {column}   " in ok("ps").out
