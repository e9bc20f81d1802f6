"""What is seen of a run while it goes on: the newest step and samples in show, all samples in logs --monitor."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from commandline import hpcjobs, ok, start
from waiting import eventually

from hpcjobs.cli.follow import _Changes
from hpcjobs.cli.progress import ProgressBars
from hpcjobs.record.metrics import SCHEMA as METRICS_SCHEMA
from hpcjobs.record.metrics import MetricsLog
from hpcjobs.record.monitor import SCHEMA as MONITOR_SCHEMA
from hpcjobs.record.monitor import Load, Sample
from hpcjobs.run.index import Entry
from hpcjobs.run.progress import StepProgress, newest_samples, newest_step
from hpcjobs.scheduler.base import JobRecord, State

LOAD = Load(cpu_percent=97.6, rss_bytes=1.5 * 2**30, gpu_percent=91.0, gpu_power_w=68.2)


def append(path: Path, kind: str, **values: object) -> None:
    """A line as a trainer writes it."""
    log = MetricsLog(path, keep_bytes=path.stat().st_size if path.exists() else 0)
    log.write(kind, **values)
    log.close()


def write_files(folder: Path, *, started_at: float = 1000.0) -> None:
    """What a trainer on two nodes has written after ten steps."""
    append(folder / "metrics.jsonl", "run", schema=METRICS_SCHEMA, workload="lm", world_size=2)
    append(folder / "metrics.jsonl", "step", step=10, epoch=0, loss=2.5, throughput=13892.4, unit="tokens/s")
    append(folder / "metrics.jsonl", "evaluation", step=10, epoch=0, loss=2.4)
    for name, host, load in (("monitor-1", "n2", Load(cpu_percent=3.0)), ("monitor", "n1", LOAD)):
        path = folder / f"{name}.jsonl"
        append(path, "monitor", schema=MONITOR_SCHEMA, host=host, interval_s=1.0, started_at=started_at)
        append(path, "sample", time_s=1.0, **load._asdict())


def test_a_sample_has_the_values_that_the_monitor_writes() -> None:
    assert Sample._fields[: 1 + len(Load._fields)] == ("time_s", *Load._fields)


def test_the_newest_step_and_sample_of_each_node_are_read_from_files_that_grow(tmp_path: Path) -> None:
    """A line that is cut off, and a loss that is no number, hide nothing."""
    assert (newest_step(tmp_path), newest_samples(tmp_path)) == (None, [])
    write_files(tmp_path)
    assert newest_step(tmp_path) == StepProgress(step=10, epoch=0, loss=2.5, throughput=13892.4, unit="tokens/s")
    assert str(newest_step(tmp_path)) == "step 10, epoch 0, loss 2.5, 13,892 tokens/s"
    assert [(node.host, node.taken) for node in newest_samples(tmp_path)] == [("n1", 1001.0), ("n2", 1001.0)]
    append(tmp_path / "metrics.jsonl", "step", step=20, epoch=0, loss=float("nan"))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    step = newest_step(tmp_path)
    assert step is not None
    assert str(step) == "step 20, epoch 0, loss NaN since step 20"
    (tmp_path / "monitor-x.jsonl").write_text("not the monitor's\n")
    assert len(newest_samples(tmp_path)) == 2


def test_a_running_job_shows_how_far_it_is_and_its_samples_can_be_followed_to_its_end(here: Path) -> None:
    program = here / "program.sh"
    program.write_text("#!/bin/bash\ntouch started\nuntil [ -e go ]; do sleep 0.1; done\n")
    program.chmod(0o755)
    job = ok("submit", "--site", "local", "--json", str(program)).json
    eventually(lambda: (here / "started").exists())
    assert "no samples: a trainer takes them with --monitor" in ok("logs", "--monitor").err
    write_files(Path(job["run_dir"]), started_at=time.time())
    shown = ok("show").out.splitlines()
    assert "progress: step 10, epoch 0, loss 2.5, 13,892 tokens/s" in shown
    (node,) = [line for line in shown if line.startswith("  n1: ")]
    assert node.startswith("  n1: CPU 98 %, memory 1.5G, GPU 91 %, GPU power 68 W  (")
    assert f"follow: hpcjobs logs --monitor -f {job['job_id']}" in shown
    copy = shutil.copytree(job["run_dir"], here / "a copy")
    assert f"follow: hpcjobs logs --monitor -f '{copy}'" in ok("show", str(copy)).out.splitlines()
    assert [node["host"] for node in ok("show", "--json").json["monitor"]] == ["n1", "n2"]
    follower = start("logs", "--monitor", "-f")
    assert follower.stdout is not None
    assert follower.stdout.readline().endswith("CPU 98 %, memory 1.5G, GPU 91 %, GPU power 68 W\n")
    append(Path(job["run_dir"]) / "monitor.jsonl", "sample", time_s=2.0, **Load(cpu_percent=50.0)._asdict())
    rest = [follower.stdout.readline() for _ in range(2)]
    assert sorted(line.split()[0] for line in rest) == ["n1", "n2"]
    (here / "go").touch()
    assert follower.communicate(timeout=120)[0] == ""
    assert follower.returncode == 0
    assert ok("wait").code == 0
    assert "progress" not in ok("show").out
    assert len(ok("logs", "--monitor").out.splitlines()) == 3


def test_samples_are_of_nodes_and_not_of_a_rank(here: Path) -> None:
    ok("submit", "--site", "local", "--wait", "true")
    answer = hpcjobs("logs", "--monitor", "--rank", "1")
    assert answer.code == 5
    assert "--monitor is about nodes" in answer.err


def test_who_follows_a_log_sees_how_far_the_data_is_copied(here: Path) -> None:
    program = here / "program.sh"
    program.write_text(
        "#!/bin/bash\n"
        'copied() { echo "{\\"nodes\\": 2, \\"ready\\": 1, \\"host\\": \\"n2\\", \\"files\\": $1, \\"files_total\\": 9,'
        ' \\"size_bytes\\": 0, \\"total_bytes\\": 1}" >"$HPCJOBS_RUN_DIR/staging.json"; }\n'
        "copied 1; until [ -e go ]; do sleep 0.1; done; rm $HPCJOBS_RUN_DIR/staging.json; echo trained\n"
    )
    program.chmod(0o755)
    ok("submit", "--site", "local", str(program))
    follower = start("logs", "-f")
    assert follower.stderr is not None
    copies = "hpcjobs: job L1 data: copied to the nodes' disks: 1 of 2 ready; n2: 1 of 9 files, 0B of 1B\n"
    assert copies in iter(follower.stderr.readline, "")
    (here / "go").touch()
    out, err = follower.communicate(timeout=100)
    assert (out, "data" in err) == ("trained\n", False)


def test_wait_shows_how_far_the_data_is_copied_before_there_are_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hpcjobs.cli.follow.PROGRESS_S", 0.0)
    changes = _Changes([Entry("7", "train", "mine", "slurm", str(tmp_path), 0.0)], ProgressBars())
    (tmp_path / "staging.json").write_text(
        '{"nodes": 2, "ready": 1, "host": "n2", "files": 4000, "files_total": 10000, "size_bytes": 0, "total_bytes": 1}'
    )
    changes.show([JobRecord("7", State.RUNNING, "job")])
    assert "job 7 data: copied to the nodes' disks: 1 of 2 ready; n2: 4,000 of" in capsys.readouterr().err
