"""Shells and commands on the nodes of a job, and changes to jobs in the queue, as a user types them."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Mapping

from login_node import SITE, Cluster
from waiting import eventually


def typed(
    cluster: Cluster, arguments: list[str], lines: list[str], *, env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Exit code and screen of ``hpcjobs …`` on a terminal, in which ``lines`` are typed once a prompt is there."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "hpcjobs", *arguments], cwd=cluster.folder, env={**os.environ, **(env or {})},
        stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(slave)
    screen, end, to_type = b"", time.monotonic() + 240, list(lines)
    try:
        while time.monotonic() < end:
            if select.select([master], [], [], 0.2)[0]:
                try:
                    screen += os.read(master, 65536)
                except OSError:  # the other side is closed
                    break
            if to_type and screen.rstrip()[-1:] in (b"$", b"#"):
                screen += b"\n"
                os.write(master, to_type.pop(0).encode() + b"\n")
        return process.wait(timeout=240), screen.decode("utf-8", "replace")
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_a_shell_and_commands_run_beside_the_tasks_of_a_job(cluster: Cluster) -> None:
    job = cluster.submit("-N", "2", "--ntasks-per-node", "2", "-t", "5m", "sleep", "300")
    job.becomes("RUNNING")
    nodes = cluster.slurm("squeue", "-h", "-o", "%N", "-j", job.id).strip()
    everywhere = cluster.hpcjobs("exec", job.id, "--", "bash", "-c", "echo on $SLURMD_NODENAME")
    assert everywhere.code == 0, everywhere
    hosts = sorted(line.split()[-1] for line in everywhere.out.splitlines())
    assert len(hosts) == 2, everywhere
    of_rank = cluster.hpcjobs("exec", "--rank", "3", job.id, "--", "printenv", "SLURMD_NODENAME")
    assert (of_rank.code, of_rank.out.split()) == (0, hosts[1:]), (of_rank, nodes)
    assert cluster.hpcjobs("exec", job.id, "--node", hosts[0], "--", "false").code == 1
    code, screen = typed(
        cluster, ["shell", "--node", hosts[1], job.id], ["echo at=$SLURMD_NODENAME threads=$OMP_NUM_THREADS", "exit 4"]
    )
    assert (code, f"at={hosts[1]} threads=1" in screen) == (4, True), screen
    answer = cluster.hpcjobs("exec", "--rank", "4", job.id, "--", "true")
    assert (answer.code, "the job's ranks are 0 to 3" in answer.err) == (5, True), answer


def test_an_allocation_is_a_shell_in_which_ranks_can_be_started(cluster: Cluster) -> None:
    arguments = ["alloc", "--site", SITE, "-N", "2", "--ntasks-per-node", "2", "-t", "5m"]
    command = "ranks bash -c 'echo rank=$RANK of=$WORLD_SIZE main=$MASTER_ADDR' | sort"
    code, screen = typed(cluster, arguments, [command, "exit 3"])
    lines = [
        line.split("rank=")[1].split()[:2] for line in screen.splitlines() if "rank=" in line and "$RANK" not in line
    ]
    assert lines == [[str(n), "of=4"] for n in range(4)], screen
    assert code == 3, screen
    alone = cluster.hpcjobs(*arguments, "bash", "-c", "echo $HPCJOBS_NTASKS ${SLURM_MPI_TYPE-unset}")
    assert (alone.code, alone.out.split()) == (0, ["4", "unset"]), alone


def test_jobs_in_the_queue_are_held_released_changed_signalled_and_requeued(cluster: Cluster) -> None:
    (cluster.folder / "mark").write_text(
        "#!/bin/bash\ntrap 'echo got it; exit 0' USR2\ntouch ready\nwhile :; do sleep 0.2; done\n"
    )
    (cluster.folder / "mark").chmod(0o755)
    job = cluster.submit("-H", "-t", "5m", "./mark")

    def shown(argument: str) -> str:
        text = cluster.slurm("scontrol", "--oneliner", "show", "job", job.id)
        return next(part.partition("=")[2] for part in text.split() if part.startswith(f"{argument}="))

    refused = cluster.hpcjobs("update", job.id, "time=+5m", "nice=7")
    assert (refused.code, f"{job.id} is held, and Slurm would release it" in refused.err) == (5, True), refused
    assert cluster.hpcjobs("update", job.id, "time=+5m", "comment=mine").code == 0
    assert (shown("TimeLimit"), shown("Comment")) == ("00:10:00", "mine")
    assert cluster.hpcjobs("release", job.id).code == 0
    eventually((cluster.folder / "ready").exists)
    (cluster.folder / "ready").unlink()
    assert cluster.hpcjobs("requeue", job.id).code == 0
    held = cluster.hpcjobs("hold", job.id)
    assert held.code == 0, held
    eventually(lambda: shown("JobState") == "PENDING" and shown("Restarts") == "1")
    assert cluster.hpcjobs("release", job.id).code == 0
    cluster.hpcjobs("update", job.id, "begin=now")
    eventually((cluster.folder / "ready").exists)
    assert cluster.hpcjobs("cancel", "--signal", "USR2", job.id).code == 0
    assert job.wait().code == 0
    assert "got it" in job.log
    answer = cluster.hpcjobs("hold", job.id)
    assert (answer.code, "has ended: COMPLETED" in answer.err) == (5, True), answer
