"""Slurm's commands as scripts on PATH that remember the jobs: those that wait, run or have ended, and their scripts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from slurm_rows import accounted_row, print_rows, queued_row

_SCRIPT = r"""#!/bin/bash
# A line of `jobs`: id, state, submit time, script, tasks. Jobs wait or run until they are cancelled, or end at once.
cd "${0%/*}" || exit 1
exec 9>lock && flock 9
case ${0##*/} in
    sbatch)
        script=${!#} id=$(($(cat last) + 1))
        array=$(sed -n 's/^#SBATCH --array=//p' "$script")
        [ ! -s refusal ] || { cat refusal >&2; exit 1; }
        echo "$id" >last
        printf '%s %s %(%s)T %s %s\n' "$id" "$(cat state)" -1 "$script" "${array:--}" >>jobs
        exec 9>&-
        [ ! -s interruption ] || kill -s "$(cat interruption)" -- "-$PPID"
        [ ! -s answer ] || { . ./answer; exit; }
        echo "$id"
        ;;
    squeue)
        while read -r id state at script array; do
            case $state$* in *--states=all* | PENDING* | RUNNING*) ;; *) continue ;; esac
            [ "$array" = - ] || id="${id}_[$array]"
            {queued}
        done <jobs
        ;;
    sacct)
        while read -r id state at script array; do
            case $* in
                *JobID,SubmitLine*) printf '%s\x1f%s\n' "$id" "sbatch --parsable $script" ;;
                *) case " ${*//[,=]/ } " in *" $id "*)
                    {accounted}
                    ;;
                esac ;;
            esac
        done <jobs
        ;;
    scontrol) printf 'ClusterName = stub\nMaxArraySize = 1001\n' ;;
    scancel) for id in "$@"; do sed -Ei "s/^$id (PENDING|RUNNING)/$id CANCELLED/" jobs; done ;;
esac
"""
_JOB = {"JobID": "$id", "State": "$state", "Partition": "compute", "Submit": "$at"}
_QUEUED = queued_row(**_JOB, NodeList="", Start="N/A", Elapsed="0:00", Command="$script")
_ACCOUNTED = accounted_row(**_JOB, NodeList="None", ElapsedRaw=0, SubmitLine="sbatch --parsable $script")


class SlurmWithMemory:
    """The scripts' folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        script = _SCRIPT.replace("{queued}", print_rows(_QUEUED)).replace("{accounted}", print_rows(_ACCOUNTED))
        for name in ("sbatch", "squeue", "scontrol", "scancel", "sacct"):
            (folder / name).write_text(script)
            (folder / name).chmod(0o755)
        self.clear()

    def clear(self, *, state: str = "PENDING", answer: str = "", interruption: str = "") -> None:
        """Forget all jobs, but not the last id. What sbatch does from now on once it has taken a job:

        Args:
            state: of new jobs.
            answer: shell lines in the place of the printed id.
            interruption: a signal to the process group of hpcjobs, before the answer.
        """
        last = (self.folder / "last").read_text() if (self.folder / "last").exists() else "100"
        for name, text in (
            *(("jobs", ""), ("last", last), ("state", state), ("answer", answer)),
            *(("interruption", interruption), ("refusal", "")),
        ):
            (self.folder / name).write_text(text)

    def jobs(self) -> dict[str, tuple[str, Path]]:
        """Id -> state and run folder of every job that was taken."""
        rows = (row.split() for row in (self.folder / "jobs").read_text().splitlines())
        return {row[0]: (row[1], Path(row[3]).parent) for row in rows}


def install(monkeypatch: pytest.MonkeyPatch, folder: Path) -> SlurmWithMemory:
    """Put the scripts first on PATH."""
    slurm = SlurmWithMemory(folder)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return slurm
