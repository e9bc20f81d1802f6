"""Names of the files in a run folder."""

JOB_SCRIPT = "job.sh"
MANIFEST, SUBMITTED, STATE, ACCOUNTING = "manifest.json", "submitted.json", "state.json", "accounting.json"
FIRST_FAILURE = "first_failure"
SIZE = "size.json"
ATTEMPTS = "attempts.jsonl"
METRICS, SUMMARY = "metrics.jsonl", "summary.json"
FIGURES_LOG = "figures.log"
CONTROL = "control"


def monitor_name(node: int) -> str:
    """The samples of the job's node number ``node``: a file per node, since lines of several hosts would mix."""
    return "monitor.jsonl" if node == 0 else f"monitor-{node}.jsonl"
