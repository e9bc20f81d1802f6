"""The files of a run folder: for each its name, type, reader, writer, owner and rule of order.

| file | module | owner | rule of order |
|---|---|---|---|
| ``manifest.json`` | `manifest` | the submitter, before the job is handed over | replaced in one step; never changed |
| ``submitted.json`` | `hpcjobs.run.job_files` | the submitter, once accepted | replaced in one step |
| ``size.json`` | `hpcjobs.scaling.size_choice` | the submitter, with ``auto`` | replaced in one step; never changed |
| ``state.json`` | `state` | the job script or ``node.pyz`` | replaced in one step |
| ``first_failure`` | `state` | the first rank that fails | first writer wins; removed at a new start |
| ``attempts.jsonl`` | `state` | ``node.pyz`` | append only; the last line may be corrected |
| ``metrics.jsonl`` | `metrics` | rank 0, or the reader of the log | append only; cut at a resumed checkpoint |
| ``summary.json`` | `summary` | rank 0 at the end | replaced in one step |
| ``summary.json``, figures | `figures` | the reader of the log, after the program | replaced in one step |
| ``monitor.jsonl`` | `monitor` | one sampler of each node | append only; emptied by the next attempt |
| ``accounting.json`` | `hpcjobs.run.job_files` | any command | replaced in one step; removed if requeued |
| ``requeued.json`` | `hpcjobs.run.job_files` | ``requeue`` | replaced in one step |
| ``control/`` | `control` | ``node.pyz``, ranks, the program | a file has one writer; ``suspects`` is append only |

"Replaced in one step": written under a temporary name and renamed (`hpcjobs.files.write_beside`).

Standard library. ``node.pyz`` includes this package except `manifest`, `metrics` and `summary`, and runs on Python 3.6.
``submitted.json``, ``size.json`` and ``accounting.json`` belong to the submit side alone: their types are structs of
the index, of the choice of a size, and of the scheduler. A run folder may belong to another user: readers open regular
files of limited size only, check every type, and ignore unknown keys.
"""

JOB_SCRIPT, BATCH_SCRIPT = "job.sh", "batch_script"
MANIFEST, SUBMITTED, STATE, ACCOUNTING = "manifest.json", "submitted.json", "state.json", "accounting.json"
REQUEUED = "requeued.json"
FIRST_FAILURE = "first_failure"
SIZE = "size.json"
ATTEMPTS = "attempts.jsonl"
METRICS, SUMMARY = "metrics.jsonl", "summary.json"
FIGURES_LOG = "figures.log"
CONTROL = "control"


def monitor_name(node: int) -> str:
    """The samples of the job's node number ``node``: a file per node, since lines of several hosts would mix."""
    return "monitor.jsonl" if node == 0 else f"monitor-{node}.jsonl"
