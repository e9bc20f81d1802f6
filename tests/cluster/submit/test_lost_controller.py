"""Submissions while slurmctld is stopped, killed and restarted at random."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from commandline import Answer
from login_node import Cluster
from waiting import eventually

from hpcjobs.processes.programs import run
from hpcjobs.sandbox import Sandbox
from hpcjobs.sandbox.folder import Daemon, Folder, alive, recorded_daemons
from hpcjobs.sandbox.services import restart_dead

UNSAVED_S = 15.0
"""slurmctld saves its list of jobs every few seconds in which it runs: one that it accepted so long before SIGKILL may
be lost there, and one that it started may be started again."""
COUNT = int(os.environ.get("LOST_CONTROLLER_JOBS", "1000"))


ANSWER_S = 10.0
"""So late a busy machine may take up an answer of sbatch."""


class Deed(NamedTuple):
    """What was done to slurmctld, and until when it did not run."""

    kind: str
    began: float
    ended: float


def _is_unsaved(accepted: float, deeds: list[Deed]) -> bool:
    """Whether a kill may have come before slurmctld saved that it had accepted, or started, a job."""
    stops = [deed for deed in deeds if deed.kind == "stop"]
    for kill in (deed.began for deed in deeds if deed.kind == "kill"):
        stood_still = sum(max(0.0, min(stop.ended, kill) - max(stop.began, accepted)) for stop in stops)
        age = kill - accepted
        if age >= -ANSWER_S and age - stood_still < UNSAVED_S:
            return True
    return False


def _controller(folder: Folder) -> Daemon:
    return next(daemon for daemon in recorded_daemons(folder) if daemon.name == "slurmctld")


def _is_gone(daemon: Daemon) -> bool:
    return not alive(daemon)


def _resume_drained(slurm_conf: str) -> None:
    """Resume nodes that slurmctld drained, as it was killed before it saved a job's start and started it once more.

    Slurm refuses until the node has registered with a controller that has just started.
    """
    env = {"SLURM_CONF": slurm_conf}
    for node in sorted(set(run(["sinfo", "-h", "-N", "-t", "drained", "-o", "%N"], env=env).out.split())):
        run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], env=env)


@contextmanager
def _disturbed(sandbox: Sandbox, chance: random.Random) -> Iterator[list[Deed]]:
    """Within the block, slurmctld is stopped, killed or restarted every few seconds; what was done, and when.

    Drained nodes are resumed meanwhile: otherwise most jobs would start after the block, where nothing disturbs them.
    """
    folder, over, deeds = Folder(Path(sandbox.root)), threading.Event(), list[Deed]()

    def disturb() -> None:
        while not over.wait(chance.uniform(1, 8)):
            _resume_drained(sandbox.slurm_conf)
            daemon, deed = _controller(folder), chance.choice(("stop", "kill", "restart"))
            is_gone = partial(_is_gone, daemon)
            began = time.time()
            if deed == "stop":
                os.kill(daemon.pid, signal.SIGSTOP)
                over.wait(chance.choice((1, 5, 35)))  # MessageTimeout is 30 s
                os.kill(daemon.pid, signal.SIGCONT)
                deeds.append(Deed(deed, began, time.time()))
                continue
            os.kill(daemon.pid, signal.SIGKILL if deed == "kill" else signal.SIGTERM)
            eventually(is_gone, what="the end of slurmctld")
            over.wait(chance.uniform(0, 8))
            restart_dead(folder)
            deeds.append(Deed(deed, began, time.time()))

    with ThreadPoolExecutor(1) as pool:
        disturber = pool.submit(disturb)
        try:
            yield deeds
        finally:
            over.set()
            disturber.result()


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_no_submission_is_lost_or_doubled_while_slurmctld_is_stopped_killed_and_restarted(
    sandbox: Sandbox, cluster: Cluster
) -> None:
    ran = cluster.folder / "ran"
    ran.mkdir()
    # A site of its own: a sandbox without a controller stands for no cluster.
    site = cluster.folder / "disturbed.yaml"
    partitions = {"compute": {"nodes": 4, "node": {"cpus": 16}}}
    site.write_text(json.dumps({"partitions": partitions, "slurm_conf": sandbox.slurm_conf}), encoding="utf-8")
    program = cluster.program("once.sh", f'#!/bin/bash\ndate +%s >>"{ran}/$1-$SLURM_JOB_ID"\n')

    def submit(number: int) -> Answer:
        return cluster.hpcjobs("submit", "--site", str(site), "--json", "-t", "5m", program, str(number), timeout_s=900)

    with _disturbed(sandbox, random.Random(1)) as deeds, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(submit, range(COUNT)))
    held = set[str]()

    def is_quiet() -> bool:
        """Slurm holds jobs that ran, of which it does not know since it was killed, and drains their nodes."""
        rows = [line.split(" ", 1) for line in cluster.slurm("squeue", "-h", "--me", "--format=%i %r").splitlines()]
        failed = {job_id for job_id, reason in rows if "launch failed" in reason}
        held.update(failed)
        if failed:
            cluster.slurm("scancel", "--quiet", *failed)
        _resume_drained(sandbox.slurm_conf)
        return not rows

    eventually(is_quiet, what="the end of all jobs", timeout_s=1800)
    runs = Counter(int(path.name.partition("-")[0]) for path in ran.iterdir())
    starts = {
        int(path.name.partition("-")[0]): [float(line) for line in path.read_text().split()] for path in ran.iterdir()
    }
    accepted = {n: cluster.took(answer.out) for n, answer in enumerate(answers) if answer.code == 0}
    when = {n: json.loads((job.run_dir / "submitted.json").read_text())["submitted"] for n, job in accepted.items()}
    # srun asks slurmctld before it starts the program, and gives up after MessageTimeout.
    unanswered = {n for n in accepted if "srun: error: Unable to" in accepted[n].log}
    unstarted = {n for n in unanswered if not runs[n]}
    repeated = {n for n, times in starts.items() if len(times) > 1} | {n for n in unanswered if runs[n]}
    states = {row["run_dir"]: row["record"]["state"] for row in cluster.rows("-a")}
    withheld = {n for n, job in accepted.items() if job.id in held and states[str(job.run_dir)] == "CANCELLED"}
    lost = [n for n in accepted if not runs[n] and n not in unstarted | withheld]
    print(f"{len(accepted)} of {COUNT} accepted, {sum(runs.values())} ran; {Counter(deed.kind for deed in deeds)}")
    print(f"{len(unstarted)} failed as srun had no answer; {len(lost)} lost by slurmctld, killed before it saved them")
    print(f"{len(repeated)} that ran were started again by slurmctld, killed before it saved that they had started")
    print(f"{len(held)} put back and held, as no node could start them: {len(withheld - runs.keys())} never began")
    print(Counter(answer.err.strip()[-200:] for answer in answers if answer.code != 0))
    assert [n for n, count in runs.items() if count > 1] == []
    unexplained = [n for n in lost if not _is_unsaved(when[n], deeds)]
    # Its first start may have come at once, and slurmctld, killed before it saved that, has it waiting again.
    unexplained += [n for n in repeated if not any(_is_unsaved(at, deeds) for at in (when[n], starts[n][0]))]
    for n in unexplained:
        near = [(deed.kind, round(deed.began - when[n], 1), round(deed.ended - when[n], 1)) for deed in deeds]
        began = [round(start - when[n], 1) for start in starts.get(n, ())]
        print(
            n, accepted[n].id, states.get(str(accepted[n].run_dir)), began, [one for one in near if -60 < one[1] < 60]
        )
        print(accepted[n].log)
    assert unexplained == []
    for number, job in accepted.items():
        expected = {"UNKNOWN"} if number in lost else {"COMPLETED"}
        if number in unstarted:  # slurmctld may hear of the end after the limit of five minutes
            expected = {"FAILED", "TIMEOUT"}
        if number in repeated:  # Slurm has the last end
            expected = {"COMPLETED", "FAILED", "TIMEOUT"}
        own = json.loads(state.read_text()) if (state := job.run_dir / "state.json").exists() else {}
        if own.get("state") == "COMPLETED":  # slurmctld heard of it after the limit, and a second start is not excluded
            expected.add("TIMEOUT")
        assert states[str(job.run_dir)] in expected or job.id in held, (number, expected, own, job.log[-800:])
    for number in runs.keys() - accepted.keys():  # it was said that this is not known, and now it is
        assert "may" in answers[number].err, answers[number]
    assert len(states) >= sum(runs.values())
    assert len(accepted) > COUNT / 2
