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

import pytest
from commandline import Answer
from login_node import Cluster
from waiting import eventually

from hpcjobs.processes.programs import run
from hpcjobs.sandbox import Sandbox
from hpcjobs.sandbox.daemons import Daemon, alive, recorded_daemons
from hpcjobs.sandbox.folder import Folder
from hpcjobs.sandbox.services import restart_dead

UNSAVED_S = 15.0
"""slurmctld saves its list of jobs every few seconds: one that it accepted so long before SIGKILL may be lost there."""
COUNT = 1000


def _controller(folder: Folder) -> Daemon:
    return next(daemon for daemon in recorded_daemons(folder) if daemon.name == "slurmctld")


def _is_gone(daemon: Daemon) -> bool:
    return not alive(daemon)


@contextmanager
def _disturbed(sandbox: Sandbox, chance: random.Random) -> Iterator[list[tuple[str, float]]]:
    """Within the block, slurmctld is stopped, killed or restarted every few seconds; what was done, and when."""
    folder, over, deeds = Folder(Path(sandbox.root)), threading.Event(), list[tuple[str, float]]()

    def disturb() -> None:
        while not over.wait(chance.uniform(1, 8)):
            daemon, deed = _controller(folder), chance.choice(("stop", "kill", "restart"))
            is_gone = partial(_is_gone, daemon)
            deeds.append((deed, time.time()))
            if deed == "stop":
                os.kill(daemon.pid, signal.SIGSTOP)
                over.wait(chance.choice((1, 5, 35)))  # MessageTimeout is 30 s
                os.kill(daemon.pid, signal.SIGCONT)
                continue
            os.kill(daemon.pid, signal.SIGKILL if deed == "kill" else signal.SIGTERM)
            eventually(is_gone, what="the end of slurmctld")
            over.wait(chance.uniform(0, 8))
            restart_dead(folder)

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
    program = cluster.program("once.sh", f'#!/bin/bash\n: >"{ran}/$1-$SLURM_JOB_ID"\n')

    def submit(number: int) -> tuple[Answer, float]:
        arguments = ("submit", "--site", str(site), "--json", "-t", "5m", program, str(number))
        return cluster.hpcjobs(*arguments, timeout_s=900), time.time()

    with _disturbed(sandbox, random.Random(1)) as deeds, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(submit, range(COUNT)))
    held = set[str]()

    def is_quiet() -> bool:
        """Slurm holds jobs that ran, of which it does not know since it was killed, and drains their nodes."""
        rows = [line.split(" ", 1) for line in cluster.slurm("squeue", "-h", "--me", "--format=%i %r").splitlines()]
        failed = {job_id for job_id, reason in rows if "launch failed" in reason}
        held.update(failed)
        if failed:
            cluster.slurm("scancel", "--quiet", *failed)
        for node in set(cluster.slurm("sinfo", "-h", "-N", "-t", "drained", "-o", "%N").split()):
            # Refused until the node has registered with a controller that has just started.
            run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], env={"SLURM_CONF": sandbox.slurm_conf})
        return not rows

    eventually(is_quiet, what="the end of all jobs", timeout_s=1800)
    runs = Counter(int(path.name.partition("-")[0]) for path in ran.iterdir())
    accepted = {n: cluster.took(answer.out) for n, (answer, _) in enumerate(answers) if answer.code == 0}
    kills = [when for deed, when in deeds if deed == "kill"]
    unsaved = {n for n in accepted if any(0 <= kill - answers[n][1] < UNSAVED_S for kill in kills)}
    lost = [n for n in accepted if not runs[n]]
    print(f"{len(accepted)} of {COUNT} accepted, {sum(runs.values())} ran; {Counter(deed for deed, _ in deeds)}")
    print(f"by slurmctld, which was killed before it saved its list: {len(lost)} lost, {len(held)} put back and held")
    print(Counter(answer.err.strip()[-200:] for answer, _ in answers if answer.code != 0))
    assert [n for n, count in runs.items() if count > 1] == []
    assert [n for n in lost if n not in unsaved] == []
    states = {row["run_dir"]: row["record"]["state"] for row in cluster.rows("-a")}
    for number, job in accepted.items():
        expected = "UNKNOWN" if number in lost else "COMPLETED"
        assert states[str(job.run_dir)] == expected or job.id in held, number
    for number in runs.keys() - accepted.keys():  # it was said that this is not known, and now it is
        assert "may" in answers[number][0].err, answers[number]
    assert len(states) >= sum(runs.values())
    assert len(accepted) > COUNT / 2
