"""What a look asks and reads: one question, files that have changed, folders of colleagues."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from commandline import hpcjobs

from hpcjobs.errors import SchedulerDownError, UnknownJobError
from hpcjobs.run import index
from hpcjobs.run.index import Entry
from hpcjobs.scheduler.base import JobRecord, Scheduler, State
from hpcjobs.top import look as looking
from hpcjobs.top.look import Looker, select_watched
from hpcjobs.top.rows import View, make_rows

SITE = "{partitions: {batch: {nodes: 2, node: {cpus: 4}}}, slurm_conf: /nowhere/slurm.conf}\n"


@pytest.fixture(autouse=True)
def site(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A default site whose scheduler is the one that the jobs were given to."""
    folder = Path.home() / ".config" / "hpcjobs" / "site_configs"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(SITE)
    monkeypatch.setenv("HPCJOBS_SITE", "mine")


class Queue:
    """A scheduler that answers from lists, and counts what it is asked."""

    def __init__(self) -> None:
        self.records: list[JobRecord] = []
        self.accounted: list[JobRecord] = []
        self.queries: list[str] = []
        self.down = False

    def connect(self, kind: str, conf: str | None) -> Scheduler:
        return self  # type: ignore[return-value]  # what a look never calls is not there

    def queue(self) -> list[JobRecord]:
        self.queries.append("queue")
        if self.down:
            raise SchedulerDownError("no answer from Slurm")
        return self.records

    def show_jobs(self, job_ids: Iterable[str]) -> list[JobRecord]:
        return []

    def account(self, job_ids: Iterable[str]) -> list[JobRecord]:
        self.queries.append(f"account {' '.join(sorted(job_ids))}")
        return self.accounted

    submit = cancel = find_submitted = None


def submit(folder: Path, job_id: str, *, array: str | None = None, user: str | None = None) -> Entry:
    """A run folder as `hpcjobs submit` leaves it."""
    run_dir = folder / f"train-{job_id}"
    run_dir.mkdir(parents=True)
    entry = Entry(
        job_id,
        "train",
        "mine",
        "slurm",
        str(run_dir),
        time.time() - 60,
        array=array,
        user=user,
        slurm_conf="/nowhere/slurm.conf",
    )
    (run_dir / "submitted.json").write_text(
        json.dumps({name: value for name in entry.__struct_fields__ if (value := getattr(entry, name)) is not None})
    )
    if user is None:
        index.add(entry)
    return entry


def record(job_id: str, state: State = State.RUNNING, **values: object) -> JobRecord:
    return JobRecord(job_id, state, "squeue", **values)  # type: ignore[arg-type]


def write_step(folder: Path, step: int, *, total: int = 100) -> None:
    path = folder / "metrics.jsonl"
    if not path.exists():
        path.write_text(json.dumps({"kind": "run", "total_steps": total}) + "\n")
    with path.open("a") as file:
        line = {"kind": "step", "step": step, "epoch": 0, "loss": 1 / step, "time_s": step / 10, "throughput": 5.0}
        file.write(json.dumps(line) + "\n")


def test_a_look_at_many_tasks_asks_the_queue_once(here: Path) -> None:
    queue = Queue()
    submit(here, "7", array="0-999")
    submit(here, "8")
    queue.records = [
        *(record(f"7_{n}", started=time.time()) for n in range(1000)),
        record("8"),
        record("9", name="other"),
    ]
    looker = Looker(connect=queue.connect)
    for _ in range(3):
        snapshot = looker.look()
    assert queue.queries == ["queue"] * 3
    assert len(snapshot.tasks) == 1002
    assert {row.job for row in make_rows(snapshot, View())} == {"9", "8", "7"}


def test_a_running_job_has_the_progress_of_its_trainer_and_reads_it_only_when_it_has_changed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, entry = Queue(), submit(here, "8")
    queue.records = [record("8")]
    folder = Path(entry.run_dir)
    write_step(folder, 10)
    write_step(folder, 20)
    looker = Looker(connect=queue.connect)
    (task,) = looker.look().tasks
    assert task.progress is not None
    assert (task.progress.share, task.progress.steps_per_s, task.progress.remaining_s) == (0.2, 10.0, 8.0)
    reads: list[Path] = []
    read = looking.read_progress
    monkeypatch.setattr(looking, "read_progress", lambda path, *rest: reads.append(path) or read(path))  # type: ignore[func-returns-value]
    snapshot = looker.reread(looker.look())
    assert reads == []
    write_step(folder, 30)
    (task,) = looker.reread(snapshot).tasks
    assert task.progress is not None
    assert (task.progress.step.step, len(reads)) == (30, 1)
    assert queue.queries == ["queue"] * 2


def test_the_files_of_a_large_array_are_read_when_it_is_unfolded(here: Path) -> None:
    queue, entry = Queue(), submit(here, "7", array="0-99")
    queue.records = [record(f"7_{n}") for n in range(100)]
    (Path(entry.run_dir) / "5").mkdir()
    write_step(Path(entry.run_dir) / "5", 50)
    looker = Looker(connect=queue.connect)
    snapshot = looker.look()
    assert all(task.progress is None for task in snapshot.tasks)
    unfolded = looker.reread(snapshot, unfolded={snapshot.tasks[0].group.key})
    assert [task.record.job_id for task in unfolded.tasks if task.progress is not None] == ["7_5"]


def test_the_chunks_of_a_sweep_are_one_row(here: Path) -> None:
    queue = Queue()
    for job_id in ("11", "12"):
        submit(here / "sweep-grid" / "chunks", job_id, array="0-2")
    queue.records = [record(f"{job}_{n}") for job in ("11", "12") for n in range(3)]
    (row,) = make_rows(Looker(connect=queue.connect).look(), View())
    assert (row.job, row.group.name, len(row.tasks)) == ("sweep", "grid", 6)


def test_a_job_of_other_means_stays_when_it_has_left_the_queue_with_the_end_that_the_accounting_has() -> None:
    queue = Queue()
    queue.records = [record("9", name="other"), record("10", name="lost")]
    looker = Looker(connect=queue.connect)
    looker.look()
    queue.records = []
    queue.accounted = [record("9", State.FAILED, exit_code=3)]
    snapshot = looker.look()
    assert {t.record.job_id: t.record.state for t in snapshot.tasks} == {"9": State.FAILED, "10": State.UNKNOWN}
    looker.look()
    assert [question for question in queue.queries if question != "queue"] == ["account 10 9"]


def test_the_accounting_of_an_ended_job_is_asked_for_at_most_twice_a_minute(here: Path) -> None:
    queue, now = Queue(), [time.time()]
    submit(here, "8")
    looker = Looker(connect=queue.connect, clock=lambda: now[0])
    for _ in range(5):
        looker.look()
        now[0] += 10
    assert queue.queries.count("account 8") == 2


def test_a_scheduler_that_does_not_answer_leaves_what_the_jobs_wrote(here: Path) -> None:
    queue, entry = Queue(), submit(here, "8")
    queue.down = True
    state = {"job_id": "8", "state": "RUNNING", "exit_code": None, "started": time.time(), "ended": None, "nodes": "n1"}
    (Path(entry.run_dir) / "state.json").write_text(json.dumps(state))
    snapshot = Looker(connect=queue.connect).look()
    assert [task.record.state for task in snapshot.tasks] == [State.RUNNING]
    assert snapshot.errors[0].startswith("no answer from Slurm")


def test_a_colleagues_folder_is_watched_by_its_files_alone(here: Path) -> None:
    """One run folder, or the folder they lie in: no scheduler is asked about another user's jobs."""
    folder = here / "theirs"
    entry = submit(folder, "8", user="eve")
    submit(folder, "9", user="eve")
    state = {"job_id": "8", "state": "RUNNING", "exit_code": None, "started": time.time(), "ended": None, "nodes": "n1"}
    (Path(entry.run_dir) / "state.json").write_text(json.dumps(state))
    write_step(Path(entry.run_dir), 25)
    assert len(select_watched([entry.run_dir])) == 1
    os.chdir(folder)
    queue = Queue()
    snapshot = Looker(select_watched(["."]), connect=queue.connect).look()
    assert [(t.record.job_id, t.record.state) for t in snapshot.tasks] == [("8", State.RUNNING), ("9", State.UNKNOWN)]
    assert snapshot.tasks[0].progress is not None
    assert snapshot.tasks[0].progress.share == 0.25
    assert queue.queries == []


def test_a_folder_without_jobs_is_refused(here: Path) -> None:
    with pytest.raises(UnknownJobError, match="no run folder of a submitted job"):
        select_watched([str(here)])


def test_the_screen_needs_a_terminal_and_names_what_prints_without() -> None:
    answer = hpcjobs("top")
    assert answer.code == 5
    assert "hpcjobs top needs a terminal" in answer.err
    assert "hpcjobs ps" in answer.err


def test_without_textual_the_line_that_installs_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'textual' else find(name, *rest)\n"
    )
    answer = hpcjobs("top", env={"PYTHONPATH": str(tmp_path)})
    assert answer.code == 3
    assert "pip install 'hpcjobs[top]'" in answer.err


def test_the_time_limit_is_that_of_the_queue_which_may_have_been_changed_since(here: Path) -> None:
    queue = Queue()
    submit(here, "8")
    queue.records = [record("8", time_limit_s=3600.0)]
    looker = Looker(connect=queue.connect)
    assert [task.record.time_limit_s for task in looker.look().tasks] == [3600]
    queue.records = [record("8", time_limit_s=7200.0)]
    assert [task.record.time_limit_s for task in looker.look().tasks] == [7200]


def test_a_program_that_counts_its_steps_anew_has_no_negative_time_left(here: Path) -> None:
    lines = [{"kind": "run", "total_steps": 1000}]
    lines += [{"kind": "step", "step": step, "time_s": seconds} for seconds, step in enumerate((900, 950, 10, 20), 1)]
    (here / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    progress = looking.read_progress(here)
    assert progress is not None
    assert (progress.steps_per_s, progress.remaining_s) == (10.0, 98.0)


@pytest.mark.parametrize(
    ("total", "step"),
    [(0, 6), (-5, 6), (10**400, 6), (100, 10**400)],
    ids=["none", "negative", "huge total", "huge step"],
)
def test_numbers_of_steps_that_are_none_leave_the_time_left_unknown(here: Path, total: int, step: int) -> None:
    lines = [
        f'{{"kind": "run", "total_steps": {total}}}',
        '{"kind": "step", "step": 5, "time_s": 1}',
        f'{{"kind": "step", "step": {step}, "time_s": 2}}',
    ]
    (here / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    progress = looking.read_progress(here)
    assert progress is not None
    assert progress.remaining_s is None
    assert str(progress) in ("step 6", "step 5/100")


def test_steps_and_epochs_that_a_program_writes_as_floats_are_read_and_parts_of_steps_are_not(here: Path) -> None:
    lines = [
        '{"kind": "run", "total_steps": 1e2}',
        '{"kind": "step", "step": 3.0, "epoch": 0.35, "time_s": 1}',
        '{"kind": "step", "step": 4.5}',
        '{"kind": "step", "step": NaN}',
    ]
    (here / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert str(looking.read_progress(here)) == "step 3/100, epoch 0.35"


@pytest.mark.parametrize("repeats", [1, 2])
def test_the_total_is_that_of_the_last_start_however_long_ago_it_was(here: Path, repeats: int) -> None:
    submit(here, "8")
    queue, path = Queue(), here / "train-8" / "metrics.jsonl"
    queue.records = [record("8")]
    looker = Looker(connect=queue.connect)
    for total in (100_000, 300_000)[:repeats]:
        with path.open("a") as file:
            file.write(json.dumps({"kind": "run", "total_steps": total}) + "\n")
            file.writelines(f'{{"kind": "step", "step": {step}, "time_s": {step}}}\n' for step in range(3000))
        (task,) = looker.look().tasks
        assert task.progress is not None
        assert task.progress.total_steps == total
    (task,) = Looker(connect=queue.connect).look().tasks
    assert task.progress is not None
    assert task.progress.total_steps == (100_000, 300_000)[repeats - 1]


def write_sample(folder: Path, number: int, host: str, *, age_s: float, gpu_percent: float = 50) -> None:
    """The file of a node whose sampler began ``age_s`` ago and took one sample."""
    head = {"kind": "monitor", "host": host, "started_at": time.time() - age_s}
    sample = {"kind": "sample", "time_s": 0, "gpu_percent": gpu_percent}
    path = folder / ("monitor.jsonl" if number == 0 else f"monitor-{number}.jsonl")
    path.write_text(json.dumps(head) + "\n" + json.dumps(sample) + "\n")


@pytest.mark.parametrize(
    ("started_s_ago", "node_list", "hosts"),
    [
        (60, "n[2-3]", ["n2", "n3.cluster"]),
        (None, "n[2-3]", ["n2", "n3.cluster"]),
        (60, None, ["n2", "n3.cluster"]),
        (60, "other[1-2]", ["n2", "n3.cluster"]),
        (9000, "n[1-9]", ["n3.cluster", "n2", "n4"]),
    ],
    ids=["requeued", "start unknown", "nodes unknown", "other names", "one attempt"],
)
def test_only_nodes_of_the_current_attempt_count(
    here: Path, started_s_ago: float | None, node_list: str | None, hosts: list[str]
) -> None:
    queue, entry = Queue(), submit(here, "8")
    started = None if started_s_ago is None else time.time() - started_s_ago
    queue.records = [record("8", started=started, node_list=node_list)]
    folder = Path(entry.run_dir)
    for number, host, age_s in ((0, "n2", 5), (1, "n3.cluster", 5), (2, "n2", 7200), (3, "n4", 7200)):
        write_sample(folder, number, host, age_s=age_s)
    (task,) = Looker(connect=queue.connect).look().tasks
    assert sorted(node.host for node in task.nodes) == sorted(hosts)
    assert all(node.taken > time.time() - 600 for node in task.nodes if node.host == "n2")


def test_samples_of_a_node_that_nobody_takes_any_more_raise_no_alarm(here: Path) -> None:
    queue, entry = Queue(), submit(here, "8")
    queue.records = [record("8")]
    for name, host, age_s, used in (("monitor.jsonl", "n1", 0, 1e9), ("monitor-1.jsonl", "n2", 7200, 7.9e9)):
        head = {"kind": "monitor", "host": host, "started_at": time.time() - age_s}
        sample = {"kind": "sample", "time_s": 0, "rss_bytes": used, "memory_limit_bytes": 8e9}
        sample["busy_percent"] = 3 if age_s else 95
        (Path(entry.run_dir) / name).write_text(json.dumps(head) + "\n" + json.dumps(sample) + "\n")
    (task,) = Looker(connect=queue.connect).look().tasks
    assert [node.host for node in task.nodes] == ["n1", "n2"]
    assert task.alarms == ()
