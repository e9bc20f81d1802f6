"""Takes samples into the run folder: node 0 of the job into monitor.jsonl, node N into monitor-N.jsonl."""

import io
import json
import os
import signal
import sys
import time
from typing import Any, Dict, Mapping, Optional

from hpcjobs.node.monitor.cgroup import JobGroup
from hpcjobs.node.monitor.gpus import Gpus, load_library
from hpcjobs.node.monitor.job_processes import JobProcesses
from hpcjobs.node.monitor.sampler import Sampler
from hpcjobs.processes.events import SignalPipe

SCHEMA = "hpcjobs.monitor/1"
_FRESH = 3
"""A file written within so many intervals has a writer, unless its last line says that it has ended."""
_END = "end"


def watch(run_dir: str, job_id: str, interval_s: float, environ: Mapping[str, str]) -> int:
    """Sample until SIGTERM. Where somebody samples this node already, say so and leave."""
    signals = SignalPipe(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    node = int(environ.get("SLURM_NODEID", "0"))
    path = os.path.join(run_dir, "monitor.jsonl" if node == 0 else f"monitor-{node}.jsonl")
    writer = _writer(path)
    if writer is not None and _grows(path, signals, interval_s):
        print(f"hpcjobs: {writer} samples {path} already", file=sys.stderr)
        return 0
    sampler = Sampler(JobProcesses(job_id), JobGroup(), Gpus(environ, load_library()))
    host = environ.get("SLURMD_NODENAME") or os.uname().nodename
    began = time.time()
    head: Dict[str, Any] = {
        "kind": "monitor",
        "schema": SCHEMA,
        "host": host,
        "interval_s": interval_s,
        "started_at": began,
    }
    head["job_id"] = job_id
    with io.FileIO(path, "w") as file:
        _append(file, head)
        last = False
        while not last:
            # Slurm and users signal all steps of a job: USR1 and USR2 are for the program.
            came = signals.wait(interval_s)
            last = any(number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) for number in came)
            if came and not last:
                continue
            line: Dict[str, Any] = {"kind": "sample", "time_s": round(time.time() - began, 3)}
            line.update(sampler.sample())
            _append(file, line)
        _append(file, {"kind": _END})
    return 0


def _append(file: io.FileIO, line: Dict[str, Any]) -> None:
    """A sample that a full disk does not take is lost; the next one is tried anew."""
    try:
        file.write(json.dumps(line).encode() + b"\n")
    except OSError as error:
        print(f"hpcjobs: a sample is lost: {error.strerror}", file=sys.stderr)


def _grows(path: str, signals: SignalPipe, interval_s: float) -> bool:
    """Whether a line comes in the time of some intervals: a sampler that was killed may have written just before."""
    size = os.path.getsize(path)
    return any(signals.wait(interval_s) or os.path.getsize(path) != size for _ in range(_FRESH))


def _writer(path: str) -> Optional[str]:
    """The host that writes to ``path`` now; None: nobody does."""
    try:
        age_s = time.time() - os.stat(path).st_mtime
        with open(path, "rb") as file:
            head, *samples = [json.loads(line.decode()) for line in file]
        has_ended = bool(samples) and samples[-1]["kind"] == _END
        return str(head["host"]) if age_s < _FRESH * float(head["interval_s"]) and not has_ended else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
