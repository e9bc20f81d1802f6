"""Snapshots for tests of the screen."""

from __future__ import annotations

from hpcjobs.record.monitor import Sample
from hpcjobs.run.index import Entry
from hpcjobs.run.progress import NodeSample, Progress, StepProgress
from hpcjobs.scheduler.base import JobRecord, State
from hpcjobs.top.rows import Group, Snapshot, Task

NOW = 1_700_000_000.0


def make_task(
    job_id: str,
    state: State,
    name: str = "train",
    *,
    progress: Progress | None = None,
    nodes: tuple[NodeSample, ...] = (),
    alarms: tuple[str, ...] = (),
    array: str | None = None,
    **record: object,
) -> Task:
    parent = job_id.split("_")[0]
    values: dict[str, object] = {"name": name, "submitted": NOW - 1000 + int(parent), **record}
    entry = Entry(parent, name, "tu-hpc", "slurm", f"/runs/{name}", NOW - 1000, array=array)
    return Task(
        group=Group(f"/runs/{name} {parent}", parent, name, "tu-hpc"),
        record=JobRecord(job_id, state, "squeue", **values),  # type: ignore[arg-type]
        entry=entry,
        progress=progress,
        nodes=nodes,
        alarms=alarms,
    )


def make_progress(step: int, total: int | None = 1000, *, speed: float | None = 2.0) -> Progress:
    losses = tuple(4.0 * 0.9**n for n in range(20))
    newest = StepProgress(step=step, epoch=1, loss=losses[-1], throughput=13_892.4, unit="tokens/s")
    return Progress(step=newest, losses=losses, total_steps=total, steps_per_s=speed)


def make_node(host: str, gpu: float | None = 91.0, cpu: float = 40.0) -> NodeSample:
    sample = Sample(
        time_s=1.0,
        cpu_percent=cpu,
        rss_bytes=1.5 * 2**30,
        gpu_percent=gpu,
        gpu_memory_bytes=None if gpu is None else 2e10,
    )
    return NodeSample(host, NOW - 2, sample)


def make_snapshot() -> Snapshot:
    """A training on two nodes, a program without metrics, an array, one that waits, and two that ended."""
    return Snapshot(
        (
            make_task("41", State.COMPLETED, "prepare", exit_code=0, elapsed_s=65.0, node_list="n1", nnodes=1),
            make_task(
                "42", State.RUNNING, "train-lm", progress=make_progress(250), time_limit_s=3600,
                nodes=(make_node("n1"), make_node("n2", 71)), elapsed_s=125.0, node_list="n[1-2]", nnodes=2,
            ),
            make_task("43", State.RUNNING, "simulate", time_limit_s=3600, elapsed_s=900.0, node_list="n3", nnodes=1),
            make_task("44_0", State.COMPLETED, "array", array="0-99", elapsed_s=10.0),
            make_task("44_1", State.FAILED, "array", array="0-99", exit_code=3, elapsed_s=4.0, node_list="n4"),
            make_task("44_2", State.RUNNING, "array", array="0-99", elapsed_s=8.0, node_list="n4", nnodes=1),
            make_task("44_[3-99]", State.PENDING, "array", array="0-99", reason="JobArrayTaskLimit"),
            make_task("45", State.PENDING, "wide", reason="Resources", nnodes=4, start_estimate=NOW + 1800),
            make_task("46", State.OUT_OF_MEMORY, "large", exit_code=0, signal=9, elapsed_s=70.0, node_list="n2"),
        ),
        (),
        NOW,
    )  # fmt: skip
