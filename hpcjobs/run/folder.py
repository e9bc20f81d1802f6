"""The run folder: everything a job was, did and left, in one place that only its owner can read.

    NAME-DATE-TIME-RANDOM/
      job.sh            the script that was sent
      shell/            what job.sh uses on the node, in bash
      batch_script      the user's own, which job.sh runs, where the job is one
      node.pyz          what decides about further attempts on the node, with --retries
      monitor.pyz       what samples the nodes, with --monitor or hpcjobs monitor; monitor.log
      attempts.jsonl, control/   how its attempts ended; where program and node.pyz meet
      manifest.json     every resolved value with its source; versions; git commit
      code.patch        what differed from that commit
      code/             the code itself, with --snapshot
      submitted.json    job id and cluster, once the scheduler took it
      logs/             NAME_ID.out
      state.json        written by the job: where it stands, how it ended
      accounting.json   the scheduler's last record of the job, once it has been read
      metrics.jsonl, summary.json, checkpoints/   from the trainer

Tasks of a job array have the part below ``logs/`` in a folder of their own, named by the index.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import msgspec

from hpcjobs import __version__
from hpcjobs.errors import HpcJobsWarning, RequestError
from hpcjobs.files import file_name, write_beside
from hpcjobs.job.models import Plan
from hpcjobs.job.script import MONITOR_PROGRAM, SHELL_FOLDER, shell_files
from hpcjobs.pyz import pack
from hpcjobs.record.names import MANIFEST
from hpcjobs.run.provenance import CodeState
from hpcjobs.run.snapshot import copy_code
from hpcjobs.user import user_name

NODE_PROGRAM = "node.pyz"
BATCH_SCRIPT = "batch_script"


def create(plan: Plan, code: CodeState | None) -> None:
    """Make the plan's run folder, whole or not at all; ``code`` is what `code_state` says of the folder it runs in.

    Raises:
        RequestError: the place cannot be written, or the code is too large for a snapshot.
    """
    root = plan.run_dir.parent
    try:
        make_root(root)
        plan.run_dir.mkdir(mode=0o700)
        (plan.run_dir / "logs").mkdir(mode=0o700)
    except OSError as error:
        raise RequestError(
            f"run folder {plan.run_dir} cannot be made: {error.strerror}", hint="run_root of the site file says where"
        ) from error
    try:
        _fill(plan, code)
    except OSError as error:
        remove(plan)
        where = f" ({error.filename2 or error.filename})" if error.filename else ""
        raise RequestError(
            f"run folder {plan.run_dir} cannot be filled: {error.strerror}{where}",
            hint="is the disk full, or the quota used up? run_root of the site file says where run folders lie",
        ) from error
    except BaseException:
        remove(plan)
        raise


def remove(plan: Plan) -> None:
    """Take back a run folder whose job was never accepted."""
    shutil.rmtree(plan.run_dir)


def log_path(run_dir: Path, name: str, job_id: str) -> Path:
    """Where the output of ``job_id`` goes, for a job and for a task of an array alike."""
    return run_dir / "logs" / f"{file_name(name)}_{job_id}.out"


def task_dir(run_dir: Path, job_id: str) -> Path:
    """The folder of one job or array task: ``123`` -> the run folder, ``123_4`` -> its ``4``."""
    _, _, index = job_id.partition("_")
    return run_dir / index if index else run_dir


def output_dir(run_dir: Path, job_id: str) -> Path:
    """The folder that the program of a job or array task writes to; for a task of a sweep the folder of its cell."""
    folder = task_dir(run_dir, job_id)
    cell = folder / "cell"
    return cell if os.path.isdir(cell) else folder


def make_root(root: Path) -> None:
    if not root.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        (root / ".gitignore").write_text("*\n")


def write_shell_files(run_dir: Path, script: str) -> None:
    """Put the shell files that ``script`` uses into a run folder."""
    (run_dir / SHELL_FOLDER).mkdir(mode=0o700)
    for name, text in shell_files(script).items():
        write_beside(run_dir / SHELL_FOLDER / name, text)


def _fill(plan: Plan, code: CodeState | None) -> None:
    job = plan.job
    manifest: dict[str, Any] = {
        "schema": 1,
        "hpcjobs": __version__,
        "created": time.time(),
        "user": user_name(),
        "host": os.uname().nodename,
        "command_line": plan.made_by,
        "command": plan.command,
        "job": job,
        "code": None
        if code is None
        else {"commit": code.commit, "dirty": code.dirty, "untracked": code.untracked, "missing": code.missing},
    }
    if code is not None and code.missing and code.dirty:
        warnings.warn(f"code.patch does not have {code.missing}", HpcJobsWarning, stacklevel=2)
    if code is not None and code.patch:
        write_beside(plan.run_dir / "code.patch", code.patch)
    if job.snapshot:
        copy_code(Path(job.chdir), plan.run_dir / "code", leave_out=plan.run_dir.parent)
    encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    write_beside(plan.run_dir / MANIFEST, encoded)
    if job.retries is not None:
        write_beside(plan.run_dir / NODE_PROGRAM, pack("hpcjobs.node"))
    if job.monitor:
        write_beside(plan.run_dir / MONITOR_PROGRAM, pack("hpcjobs.node.monitor"))
    write_shell_files(plan.run_dir, plan.script)
    if job.batch_script is not None:
        write_beside(plan.run_dir / BATCH_SCRIPT, job.batch_script, mode=0o700)
    write_beside(plan.run_dir / "job.sh", plan.script, mode=0o700)
