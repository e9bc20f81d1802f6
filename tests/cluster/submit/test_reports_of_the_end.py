"""Reports of a job's end from a node of a real Slurm, and a dependency that can never be met."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from login_node import Cluster
from waiting import eventually

RECEIVER = """\
import http.server, pathlib, sys
folder = pathlib.Path(sys.argv[1])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with (folder / "posts").open("ab") as file:
            file.write(body.strip() + b"\\n")
        self.send_response(200)
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
(folder / "port").write_text(str(server.server_port))
server.serve_forever()
"""
ONCE = "#!/bin/bash\n[ -e again ] && exit 0\ntouch again\nexit 3\n"


def posts(folder: Path) -> list[dict[str, Any]]:
    """What the server has been sent."""
    file = folder / "posts"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_webhook_hears_of_the_end_a_failure_a_cancellation_and_a_requeue(cluster: Cluster) -> None:
    receiver = cluster.submit("-t", "20m", "-c", "1", cluster.program("receiver.py", RECEIVER), str(cluster.folder))
    receiver.becomes("RUNNING")
    eventually((cluster.folder / "port").exists)
    host = cluster.slurm("squeue", "-h", "-o", "%N", "-j", receiver.id).strip()
    hook = cluster.folder / "hook"
    hook.touch(mode=0o600)
    hook.write_text(f"http://127.0.0.1:{(cluster.folder / 'port').read_text()}/s3cret\n")
    arguments = ("-w", host, "-c", "1", "-t", "5m", "--notify", f"webhook:{hook}")
    endless = cluster.submit(*arguments, "-J", "endless", "sleep", "300")
    again = cluster.submit(*arguments, "-J", "again", "--retries", "error=1", cluster.program("once.sh", ONCE))
    good = cluster.submit(*arguments, "-J", "good", "true")
    bad = cluster.submit(*arguments, "-J", "bad", "false")
    tasks = cluster.submit(*arguments, "-J", "tasks", "--array", "3,7", "true")
    endless.becomes("RUNNING")
    assert cluster.hpcjobs("cancel", endless.id).code == 0
    for job in (endless, again, good, bad, tasks):
        job.wait()
    expected = {
        ("endless", "fail", "CANCELLED"),
        ("again", "requeue", "REQUEUED"),
        ("again", "end", "COMPLETED"),
        ("good", "end", "COMPLETED"),
        ("bad", "fail", "FAILED"),
        ("tasks", "end", "COMPLETED"),
    }
    eventually(lambda: {(p["name"], p["event"], p["state"]) for p in posts(cluster.folder)} == expected)
    assert len(posts(cluster.folder)) == len(expected) + 1
    for job in (endless, again, good, bad):
        assert "s3cret" not in job.log + (job.run_dir / "job.sh").read_text()
    assert {p["job_id"] for p in posts(cluster.folder)} == {
        *(endless.id, again.id, good.id, bad.id, f"{tasks.id}_3", f"{tasks.id}_7")
    }


def test_waiting_for_a_dependency_that_can_never_be_met_ends_with_the_reason(cluster: Cluster) -> None:
    first = cluster.submit("-t", "5m", "-o", "hold", "false")
    second = cluster.submit("-t", "5m", "--after", first.id, "true")
    cluster.slurm("scontrol", "release", first.id)
    eventually(lambda: "DependencyNeverSatisfied" in cluster.slurm("squeue", "-h", "-o", "%r", "-j", second.id))
    answer = second.wait()
    assert answer.code != 0
    assert f"job {second.id} will not start: its dependency can never be satisfied" in answer.err, answer
