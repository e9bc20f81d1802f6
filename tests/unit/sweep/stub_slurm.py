"""Slurm's commands as stubs on PATH: a queue in a folder, with a limit on its jobs and a reason to refuse others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from slurm_rows import print_rows, queued_row

REFUSED = (
    "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy"
    " (job submit limit, user's size and/or time limits)"
)

_STUB = r"""#!/bin/bash
cd "${0%/*}" || exit 1
queued() { awk '{ n += $2 } END { print n + 0 }' queue; }
refused() { [ -z "$limit_name" ] || echo "sbatch: error: $limit_name" >&2; cat text >&2; exit 1; }
case ${0##*/} in
    sbatch)
        script=${!#} test_only='' array=''
        for word in "$@"; do
            case $word in --test-only) test_only=yes ;; --array=*) array=${word#*=} ;; esac
        done
        [ -n "$array" ] || array=$(sed -n 's/^#SBATCH --array=//p' "$script")
        array=${array%\%*} tasks=1
        [ -z "$array" ] || tasks=$((${array#*-} + 1))
        if [ -e refuse ] && ! grep -q '^#SBATCH --job-name=.*-next' "$script"; then
            limit_name=$(cat refuse)
            refused
        fi
        if (($(queued) + tasks > $(cat limit))); then
            [ ! -e name_it ] || limit_name=AssocMaxSubmitJobLimit
            refused
        fi
        [ -z "$test_only" ] || { echo "sbatch: Job 1 to start" >&2; exit 0; }
        id=$(($(cat last) + 1))
        echo "$id" >last
        echo "$id $tasks $script" >>queue
        echo "$id"
        ;;
    squeue)
        [ ! -e silent ] || exit 0
        while read -r id tasks script; do
            [ "$tasks" -eq 1 ] || id="${id}_[0-$((tasks - 1))]"
            {row}
        done <queue
        ;;
    scontrol)
        [[ " $* " == *' show job '* ]] || { echo 'MaxArraySize            = 1001'; exit 0; }
        while read -r id tasks script; do
            echo "JobId=$id ArrayJobId=$id ArrayTaskId=0-$((tasks - 1)) JobState=PENDING Command=$script"
        done <queue
        ;;
    scancel) for id in "$@"; do sed -i "/^$id /d" queue; done ;;
    sacct) ;;
esac
"""
_ROW = queued_row(JobID="$id", State="PENDING", Reason="$(cat reason)", Submit=1, Start=0, Command="$script")


class StubSlurm:
    """The stubs' folder. ``limit``: jobs that the queue takes, array tasks counted one by one."""

    def __init__(self, folder: Path, *, limit: int, name_the_limit: bool) -> None:
        self._folder = folder
        folder.mkdir()
        for name in ("sbatch", "squeue", "scontrol", "scancel", "sacct"):
            (folder / name).write_text(_STUB.replace("{row}", print_rows(_ROW)))
            (folder / name).chmod(0o755)
        for name, text in (
            ("queue", ""),
            ("reason", "None"),
            ("last", "100"),
            ("limit", str(limit)),
            ("text", REFUSED + "\n"),
        ):
            (folder / name).write_text(text)
        if name_the_limit:
            (folder / "name_it").touch()

    def refuse(self, limit_name: str = "") -> None:
        """Refuse all but the small jobs of a sweep; ``limit_name``: what newer versions print beside the text."""
        (self._folder / "refuse").write_text(limit_name)

    def add_foreign_job(self) -> None:
        """Queue a job that is no part of a sweep."""
        with (self._folder / "queue").open("a") as file:
            file.write("7 1 /elsewhere/job.sh\n")

    def silence_queue(self) -> None:
        """From now on squeue prints nothing, and ends with exit code 0."""
        (self._folder / "silent").touch()

    def end(self, job_id: str) -> None:
        """Take a job out of the queue."""
        rows = (self._folder / "queue").read_text().splitlines(keepends=True)
        (self._folder / "queue").write_text("".join(row for row in rows if row.split()[0] != job_id))

    def queue(self) -> dict[str, int]:
        """Id -> number of tasks."""
        rows = (row.split() for row in (self._folder / "queue").read_text().splitlines())
        return {row[0]: int(row[1]) for row in rows}


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, *, limit: int, name_the_limit: bool = True) -> StubSlurm:
    """Put the stubs first on PATH."""
    stub = StubSlurm(folder, limit=limit, name_the_limit=name_the_limit)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return stub
