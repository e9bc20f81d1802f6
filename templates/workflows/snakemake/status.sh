#!/usr/bin/env bash
# status.sh JOB: prints success, failed or running, as Snakemake expects it. A job that cannot be read now is running:
# Snakemake looks again, and a failed one would be run twice.
hpcjobs show --json "$1" | python3 -c '
import json, sys
try:
    state = json.load(sys.stdin)["records"][0]["state"]
except (ValueError, LookupError):
    state = "UNKNOWN"
ended = {
    "BOOT_FAIL", "CANCELLED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
    "RECONFIG_FAIL", "REVOKED", "TIMEOUT",
}
print("success" if state == "COMPLETED" else "failed" if state in ended else "running")
'
