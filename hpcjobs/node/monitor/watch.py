"""Takes samples into the run folder: node 0 of the job into monitor.jsonl, node N into monitor-N.jsonl."""

import fcntl
import io
import json
import os
import signal
import sys
import time
from typing import Any, Dict, Mapping, Optional

from hpcjobs.node.monitor.cgroup import JobGroup
from hpcjobs.node.monitor.gpus import GpuReader, load_library
from hpcjobs.node.monitor.job_processes import JobProcesses
from hpcjobs.node.monitor.sampler import NodeSampler
from hpcjobs.processes.events import SignalPipe
from hpcjobs.record.names import monitor_name

SCHEMA = "hpcjobs.monitor/1"
_FRESH = 3
"""A file written within so many intervals has a writer, unless its last line says that it has ended."""
_END = "end"


def watch(run_dir: str, job_id: str, interval_s: float, environ: Mapping[str, str]) -> int:
    """Sample until SIGTERM. Where somebody samples this node already, say so and leave: 1 if it is another job."""
    signals = SignalPipe(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    node = int(environ.get("SLURM_NODEID", "0"))
    path = os.path.join(run_dir, monitor_name(node))
    with io.FileIO(path, "a") as file:
        writer = _writer(path, interval_s)
        if not _lock(file) or (writer is not None and _grows(path, signals, interval_s)):
            print(f"hpcjobs: {writer or 'another sampler'} samples {path} already", file=sys.stderr)
            return 0 if _head(path).get("job_id") in (job_id, None) else 1
        _sample(file, path, signals, job_id, interval_s, environ)
    return 0


def _sample(
    file: io.FileIO, path: str, signals: SignalPipe, job_id: str, interval_s: float, environ: Mapping[str, str]
) -> None:
    """Append samples until SIGTERM; those of another node or job, an attempt before this one, are removed first."""
    sampler = NodeSampler(JobProcesses(job_id), JobGroup(), GpuReader(environ, load_library()))
    host = environ.get("SLURMD_NODENAME") or os.uname().nodename
    head = _head(path)
    if (head.get("host"), head.get("job_id")) == (host, job_id) and isinstance(head.get("started_at"), float):
        if not _has_complete_lines(path):
            file.write(b"\n")
    else:
        file.truncate(0)
        head = {"kind": "monitor", "schema": SCHEMA, "host": host, "interval_s": interval_s, "started_at": time.time()}
        head["job_id"] = job_id
        _append(file, head)
    last = False
    while not last:
        # Slurm and users signal all steps of a job: USR1 and USR2 are for the program.
        came = signals.wait(interval_s)
        last = any(number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) for number in came)
        if came and not last:
            continue
        line: Dict[str, Any] = {"kind": "sample", "time_s": round(time.time() - head["started_at"], 3)}
        line.update(sampler.sample())
        _append(file, line)
    _append(file, {"kind": _END})


def _lock(file: io.FileIO) -> bool:
    """Keep other samplers of this node away; where the file system has no locks, the file's age alone does."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


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


def _head(path: str) -> Dict[str, Any]:
    """The first line; empty where there is none that can be read."""
    try:
        with open(path, "rb") as file:
            head = json.loads(file.readline().decode())
    except (OSError, ValueError):
        return {}
    return head if isinstance(head, dict) else {}


def _has_complete_lines(path: str) -> bool:
    """Whether the last line ends: of a sampler that was killed it may not."""
    with open(path, "rb") as file:
        return not file.seek(0, 2) or (file.seek(-1, 2), file.read())[1] == b"\n"


def _writer(path: str, interval_s: float) -> Optional[str]:
    """The host that writes to ``path`` now; None: nobody does. A line that is being written is a sign of somebody."""
    try:
        status = os.stat(path)
        with open(path, "rb") as file:
            lines = file.read().split(b"\n")
    except OSError:
        return None
    head = _head(path)
    if not status.st_size or time.time() - status.st_mtime >= _FRESH * float(head.get("interval_s", interval_s)):
        return None
    has_ended = lines[-1] == b"" and lines[-2] == json.dumps({"kind": _END}).encode()
    return None if has_ended else str(head.get("host", "another sampler"))
