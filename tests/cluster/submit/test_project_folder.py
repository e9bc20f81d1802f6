"""What is typed in a folder that has a project file and nothing else: a job, a notebook, a sweep of a function."""

from __future__ import annotations

import subprocess
import sys

from login_node import SITE, Cluster
from waiting import eventually

SWEEP = """import hpcjobs


def square(x: int) -> int:
    return x * x


if __name__ == "__main__":
    executor = hpcjobs.executor(time="5m")
    jobs = executor.map_array(square, [1, 2, 3])
    print([job.result() for job in jobs], *{job.job_id.partition("_")[0] for job in jobs})
"""


def test_the_site_of_the_project_file_is_that_of_jupyter_and_of_submitits_executor(cluster: Cluster) -> None:
    (cluster.folder / "hpcjobs.yaml").write_text(f"site: {SITE}\nprogram: hostname\n")
    submitted = cluster.hpcjobs("submit", "--json")
    assert submitted.code == 0, submitted
    job = cluster.took(submitted.out)
    assert (submitted.json["site"], job.wait().code) == (SITE, 0)

    answer = cluster.hpcjobs("jupyter", "--detach", "--json")
    assert answer.code == 0, answer
    session = answer.json
    cluster.submitted.append(session["job_id"])
    assert session["node"].startswith("tu"), session
    assert cluster.hpcjobs("jupyter", "stop", session["job_id"]).code == 0

    (cluster.folder / "sweep.py").write_text(SWEEP)
    argv = [sys.executable, "sweep.py"]
    swept = subprocess.run(argv, cwd=cluster.folder, capture_output=True, text=True, timeout=500)
    assert swept.stdout.startswith("[1, 4, 9] "), swept
    question = ("sacct", "-nXj", swept.stdout.split()[-1], "-o", "state")
    eventually(lambda: "COMPLETED" in cluster.slurm(*question), what="the end in the accounting, which is late")
