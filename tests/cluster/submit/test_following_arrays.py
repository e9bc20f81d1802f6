"""`hpcjobs logs -f` on an array: lines of all tasks, in all attempts, each once."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

from commandline import start
from login_node import SITE, Cluster
from waiting import eventually

TASK = """\
#!/bin/bash
[ "$RANK" = 0 ] || sleep 0.1
echo "attempt ${SLURM_RESTART_COUNT:-0} begins"
until [ -e "go-$SLURM_ARRAY_TASK_ID" ]; do sleep 0.1; done
echo "attempt ${SLURM_RESTART_COUNT:-0} ends"
"""


def test_an_array_is_followed_through_requeues_of_a_task_and_of_all_tasks(cluster: Cluster, workdir: Path) -> None:
    program = cluster.program("task.sh", TASK)
    array = ("--array", "0-2", "--ntasks-per-node", "2", "--cpus-per-task", "1", "-o", "requeue=1", "--time", "10m")
    job = cluster.submit(*array, "--name", "three", program)
    follower = start("logs", "-f", "three", "--site", SITE)
    lines: list[str] = []
    assert follower.stdout is not None
    reader = threading.Thread(target=lambda: lines.extend(follower.stdout))  # type: ignore[arg-type]
    reader.start()

    def await_lines(attempts: dict[int, int], what: str) -> None:
        expected = {f"[{task}] {rank}: attempt {n} {what}\n" for task, n in attempts.items() for rank in (0, 1)}
        eventually(lambda: expected <= set(lines), what=str(expected))

    try:
        await_lines({0: 0, 1: 0, 2: 0}, "begins")
        cluster.hpcjobs("requeue", f"{job.id}_1")
        await_lines({1: 1}, "begins")
        cluster.hpcjobs("requeue", job.id)
        await_lines({0: 1, 1: 2, 2: 1}, "begins")
        (workdir / "go-0").touch()
        await_lines({0: 1}, "ends")
        cluster.hpcjobs("requeue", f"{job.id}_2")
        await_lines({2: 2}, "begins")
        for task in (1, 2):
            (workdir / f"go-{task}").touch()
        await_lines({1: 2, 2: 2}, "ends")
        assert follower.wait(timeout=120) == 0
    finally:
        follower.kill()
        reader.join()
        follower.communicate()
    written = [
        f"[{path.stem.rpartition('_')[2]}] {line}"
        for path in (job.run_dir / "logs").iterdir()
        for line in path.read_text().splitlines(keepends=True)
    ]
    assert Counter(lines) == Counter(written)
