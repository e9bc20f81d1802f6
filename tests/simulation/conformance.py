"""Plays the same random commands on a real Slurm and on the simulated one, and compares what they answer.

python tests/simulation/conformance.py --seeds 0-199       as root, where a sandbox can be (tools/elsewhere)

A sequence has jobs that wait until they are told to end. After each command both clusters come to rest; then squeue,
sacct and scontrol are asked as hpcjobs asks them. A line is one command's answer, or one row of these. Each lane of the
sandbox is a partition of two nodes, so that sequences run beside each other. The real one has twelve seconds to show
what the simulated one shows.

Not compared, and why:

- times by value, since one clock is virtual;
- sacct's rows of jobs that wait, which come later than the queue by any time, and its reasons;
- which tasks of an array share a row of sacct, of those that were cancelled or requeued before they began: it depends
  on when slurmdbd heard of the array. Each task is compared, whether it has a row or a part of that of "7_[1-2]";
- what a cancelled job last waited for, and whether a job waits for nodes, for nodes that are down, or behind another
  one: the scheduler's two passes differ;
- which of several free nodes a job gets: a node fails where both have the same jobs on it;
- exit codes of starts that were requeued: the requeue and the end of the batch script come in any order.

Known to differ: the start of a job that is cancelled just as its requeue ends its processes, the start of a job that
was held and released while it ran and then cancelled and requeued, and what starts between two requeues at once.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

sys.path.insert(0, str(Path(__file__).parent))

import slurm as simulated
from slurm import Attempt, Settings, Slurm
from world import World

from hpcjobs import sandbox as sandboxes
from hpcjobs import slurm_commands
from hpcjobs.processes.start import Result
from hpcjobs.sandbox import Sandbox, Shape
from hpcjobs.scheduler.slurm.parse import ACCOUNTED, QUEUED
from hpcjobs.slurm_commands import hosts_of
from hpcjobs.units import array_indices

LANES, NODES = 6, 2
PATIENCE_S = float(os.environ.get("PATIENCE_S", "12"))
KILL_WAIT_S = 5.0
QUESTION = slurm_commands.question_env(None)
SCRIPT = """#!/bin/bash
# So long as others may do something to a job that is ending.
trap 'sleep 2; trap - TERM; kill -TERM $$' TERM
case $SLURM_JOB_NAME in *i) trap '' TERM ;; esac
end={folder}/$SLURM_JOB_NAME${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}.end
until [ -e "$end" ]; do sleep 0.2; done
code=$(cat "$end"); rm "$end"; exit "$code"
"""


SITE = """{{"partitions": {{{partitions}}}, "defaults": {{"time": "30m"}}}}"""
SHOWN = ("JobState", "Reason", "Requeue", "Restarts", "ExitCode", "TimeLimit", "NodeList", "ExcNodeList", "NumNodes")
TIMES = ("StartTime", "EndTime", "PreemptTime")


class Cluster(Protocol):
    """What answers commands, and has jobs that end when they are told to."""

    partition: str

    def run(self, *argv: str) -> Result: ...

    def end_job(self, name: str, task: int | None, code: int) -> None: ...

    @property
    def node_names(self) -> list[str]: ...


class Real:
    """A lane of the sandbox."""

    def __init__(self, sandbox: Sandbox, lane: int, folder: Path) -> None:
        self.partition, self._folder = f"lane{lane}", folder
        self.node_names = list(sandbox.partitions[self.partition])
        passed = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        self._env = {**passed, **sandboxes.environment(), **QUESTION, "LC_ALL": "C"}
        self.version = simulated.version_like(self.run("squeue", "--version").out.split()[1])

    def run(self, *argv: str) -> Result:
        done = subprocess.run(argv, env=self._env, cwd=self._folder, capture_output=True, text=True, check=False)
        return Result(done.returncode, done.stdout, done.stderr)

    def end_job(self, name: str, task: int | None, code: int) -> None:
        path = self._folder / (name if task is None else f"{name}_{task}")
        path.with_suffix(".part").write_text(f"{code}\n")
        path.with_suffix(".part").rename(path.with_suffix(".end"))

    def clean(self) -> None:
        """No job is left, and both nodes are there."""
        self.run("scancel", "--quiet", f"--partition={self.partition}")
        for name in self.node_names:
            self.run("scontrol", "update", f"NodeName={name}", "State=RESUME")
        give_up = time.monotonic() + 60
        while self.run("squeue", "--noheader", f"--partition={self.partition}").out and time.monotonic() < give_up:
            time.sleep(0.3)
        nodes = ("sinfo", "--noheader", "--Node", f"--partition={self.partition}", "--format=%t")
        while set(self.run(*nodes).out.split()) != {"idle"} and time.monotonic() < give_up:
            time.sleep(0.3)
        for path in self._folder.glob("*.end"):
            path.unlink()


class Simulated:
    """The same lane in virtual time."""

    def __init__(self, seed: int, version: str, folder: Path) -> None:
        self.partition = "lane"
        self.world = World(seed)
        settings = Settings(
            nodes=NODES,
            max_time_s=2 * 86400.0,
            kill_wait_s=KILL_WAIT_S,
            requeue_delay_s=6.0,
            accounting="prompt",
            min_job_age_s=1e6,
            preempts=False,
            version=version,
        )
        simulated.USER, simulated.UID = "root", 0
        self.slurm = Slurm(self.world, settings, lambda job: self._play)
        self.slurm.next_id = 1000  # an id is found in a text, and no number of a task is like it
        self.node_names, self._folder = self.slurm.names, folder

    def _play(self, attempt: Attempt) -> int:
        """As the script does."""
        job, world = attempt.job, self.world
        while True:
            for number in world.wait_signals(None):
                if number <= 0:
                    return -number
                if number == 15 and not job.name.endswith("i"):
                    world.sleep(2.0)
                    return 143

    def run(self, *argv: str) -> Result:
        return self.slurm.run([part.replace("{cwd}", str(self._folder)) for part in argv], dict(QUESTION))

    def end_job(self, name: str, task: int | None, code: int) -> None:
        for job in self.slurm.jobs.values():
            if job.name == name and job.task == task and job.attempt is not None and job.attempt.process is not None:
                self.world.signal(job.attempt.process, -code)

    def rest(self, seconds: float) -> None:
        target = self.world.now + seconds
        self.world.at(target, lambda: None)
        self.world.run(seconds)


class Known(NamedTuple):
    """A job of a sequence."""

    name: str
    roots: tuple[str, str]
    """Its id on the simulated cluster, and on the real one."""
    tasks: tuple[int, ...]


class Line(NamedTuple):
    """One line that both should have printed."""

    seed: int
    step: int
    event: str
    kind: str
    simulated: str
    real: str

    @property
    def agrees(self) -> bool:
        return self.simulated == self.real


class Player:
    """Plays one sequence on both clusters."""

    def __init__(self, seed: int, real: Real, folder: Path, *, length: int = 8) -> None:
        self.seed, self.draw, self.length = seed, random.Random(seed), length
        self.real, self.model, self.folder = real, Simulated(seed, real.version, folder), folder
        self.clusters: tuple[Cluster, Cluster] = (self.model, real)
        self.jobs: list[Known] = []
        self.lines: list[Line] = []
        self.step, self.event = 0, ""

    def play(self) -> list[Line]:
        try:
            for step in range(self.length):
                self.step = step
                choices = SUBMITS if not self.jobs or (len(self.jobs) < 4 and self.draw.random() < 0.35) else OTHERS
                event = self.draw.choice(choices)
                self.event = event.__name__
                job = self.draw.choice(self.jobs) if self.jobs else None
                event(self, job)  # type: ignore[arg-type]
                self.observe(job)
        finally:
            self.real.clean()
            self.model.world.close()
        return self.lines

    # --- commands

    def both(self, *argv: str) -> tuple[Result, Result]:
        """Run a command on both; ``{0}`` is replaced by the id of the first job, and so on; compare the answers."""
        results = []
        for side, cluster in enumerate(self.clusters):
            ids = [job.roots[side] for job in self.jobs]
            filled = [self._fill(part, ids, cluster) for part in argv]
            results.append(cluster.run(*filled))
        texts = [
            f"{result.code} {self.normal(result.out, side, names_jobs=True)} "
            f"{self.normal(result.err, side, names_jobs=True)}".strip()
            for side, result in enumerate(results)
        ]
        self.lines.append(Line(self.seed, self.step, self.event, argv[0], *texts))
        return results[0], results[1]

    def _fill(self, part: str, ids: list[str], cluster: Cluster) -> str:
        for number, job_id in enumerate(ids):
            part = part.replace(f"{{{number}}}", job_id)
        for number, name in enumerate(cluster.node_names):
            part = part.replace(f"{{node{number}}}", name)
        return part.replace("{partition}", cluster.partition).replace("{script}", str(self.folder / "job.sh"))

    def normal(self, text: str, side: int, *, names_jobs: bool = False) -> str:
        """Without what differs between any two clusters: ids, names of nodes and partitions, folders."""
        cluster = self.clusters[side]
        for number, name in enumerate(cluster.node_names):
            text = text.replace(name, f"node{number}")
        for number, job in enumerate(self.jobs if names_jobs else []):
            text = re.sub(rf"(?<![\w.:-]){job.roots[side]}(?=\D|$)", f"JOB{number}", text)
        text = text.replace("JobHeldAdmin", "JobHeldUser")  # the sandbox's user is root
        text = text.replace("Priority", "Resources")  # whichever pass of the scheduler looked last
        text = re.sub(r"Nodes[ _]required[ _]for[ _]job[^|]*", "Resources", text)
        text = text.replace("Resources,Resources", "Resources")  # of tasks that squeue prints in one line
        prefix = cluster.node_names[0].rstrip("0123456789")
        text = re.sub(rf"{re.escape(prefix)}\[[\d,-]+\]", "node0,node1", text)
        text = text.replace(cluster.partition, "PARTITION").replace(str(self.folder), "FOLDER")
        return re.sub(r"JobId=\d+|sbatch: Job \d+ to start.*", "", " ".join(text.split())).strip()

    def submit(self, *options: str, suffix: str = "", tasks: Sequence[int] = ()) -> None:
        name = f"s{self.seed}j{len(self.jobs)}{suffix}"
        command = ["sbatch", "--parsable", "--partition={partition}", f"--job-name={name}", "--exclusive"]
        limit = [] if any(option.startswith("--time") for option in options) else ["--time=30"]
        answers = []
        for side, cluster in enumerate(self.clusters):
            ids = [job.roots[side] for job in self.jobs]
            answers.append(
                cluster.run(*(self._fill(p, ids, cluster) for p in [*command, *limit, *options, "{script}"]))
            )
        accepted = [answer.code == 0 for answer in answers]
        texts = [
            f"{answer.code} {self.normal(answer.err, side, names_jobs=True)}".strip()
            for side, answer in enumerate(answers)
        ]
        self.lines.append(Line(self.seed, self.step, self.event, "sbatch", *texts))
        if all(accepted):
            self.jobs.append(Known(name, (answers[0].out.strip(), answers[1].out.strip()), tuple(tasks)))

    def end(self, job: Known, task: int | None, code: int) -> None:
        for cluster in self.clusters:
            cluster.end_job(job.name, task, code)

    def is_running(self, job: Known, task: int | None = None) -> bool:
        """On the simulated cluster."""
        return any(j.name == job.name and j.task == task and j.attempt is not None and not j.completing
                   for j in self.model.slurm.jobs.values())  # fmt: skip

    def on_first_node(self, side: int) -> set[str]:
        """The jobs that run there, since which of several free nodes a job gets is not compared."""
        cluster = self.clusters[side]
        out = cluster.run("squeue", "--noheader", f"--partition={cluster.partition}", "--format=%i %N").out
        rows = [line.split() for line in out.splitlines()]
        ids = [row[0] for row in rows if len(row) == 2 and cluster.node_names[0] in hosts_of(row[1])]
        return {self.normal(job_id, side, names_jobs=True) for job_id in ids}

    def number(self, job: Known) -> int:
        return self.jobs.index(job)

    # --- what is seen

    def observe(self, job: Known | None) -> None:
        """Both come to rest; then their answers are compared."""
        if not self.jobs:
            return
        self.model.rest(30.0)
        shown = self.jobs[-1] if job is None or job not in self.jobs else job
        expected = self.view(0, shown)
        give_up, before = time.monotonic() + PATIENCE_S, None
        while True:
            seen = self.view(1, shown)
            if time.monotonic() > give_up or (seen == expected and before == expected):
                break
            before = seen
            time.sleep(0.25)
        keys = sorted({*expected, *seen})
        for key in keys:
            self.lines.append(
                Line(self.seed, self.step, self.event, key.partition(" ")[0], f"{key} {expected.get(key, 'no row')}",
                     f"{key} {seen.get(key, 'no row')}")
            )  # fmt: skip

    def view(self, side: int, shown: Known) -> dict[str, str]:
        """Rows of the tables that hpcjobs reads, by table and job."""
        cluster, rows = self.clusters[side], dict[str, str]()
        roots = {job.roots[side] for job in self.jobs}
        out = cluster.run(*slurm_commands.list_queue(*QUEUED, states=("all",), partition=cluster.partition)).out
        for row in QUEUED.rows(out):
            if row.raw("JobID").partition("_")[0] not in roots:
                continue  # of an earlier sequence
            state = row.raw("State")
            start = "" if state == "PENDING" else _moment(row.raw("Start"))
            command = os.path.basename(row.raw("Command"))
            reason = "" if state == "CANCELLED" else row.raw("Reason")  # what it last waited for
            values = (row.raw("JobName"), state, reason, _count_nodes(row.raw("NodeList")), row.raw("NNodes"),
                      _moment(row.raw("Submit")), start, row.raw("TimeLimit"), command)  # fmt: skip
            rows[self._key("squeue", row.raw("JobID"), side, rows)] = self.normal("|".join(values), side)
        for name, attempts in (("sacct", False), ("sacct-D", True)):
            out = cluster.run(*slurm_commands.list_accounted(*ACCOUNTED, jobs=sorted(roots), attempts=attempts)).out
            accounted = [row for row in ACCOUNTED.rows(out) if row.raw("State") != "PENDING"]
            # Which of the tasks that waited together have a row of their own depends on when slurmdbd heard of them.
            own = {(row.raw("JobID"), row.raw("Submit")) for row in accounted}
            by_task = [(row, job_id) for row in accounted for job_id in _ids_of(row.raw("JobID"))
                       if job_id == row.raw("JobID") or (job_id, row.raw("Submit")) not in own]  # fmt: skip
            for row, job_id in sorted(by_task, key=lambda pair: pair[0].raw("Submit")):
                never_ran = row.raw("NodeList") == "None assigned"
                # A requeue and the end of the batch script come in any order.
                ending = "" if never_ran or row.raw("State") == "REQUEUED" else row.raw("ExitCode")
                start = "" if never_ran else _moment(row.raw("Start"))
                values = (row.raw("JobName"), row.raw("State"), _count_nodes(row.raw("NodeList")), row.raw("NNodes"),
                          _moment(row.raw("Submit")), start, _moment(row.raw("End")), ending)  # fmt: skip
                rows[self._key(name, job_id, side, rows)] = self.normal("|".join(values), side)
        out = cluster.run(*slurm_commands.show_job(shown.roots[side])).out
        for line in out.splitlines():
            pairs = dict(reversed(re.findall(r"(?:^|\s)([A-Za-z]+)=(\S*)", line)))
            if pairs.get("JobState") == "CANCELLED":
                pairs["Reason"] = ""
            if pairs.get("Restarts") != "0" and pairs.get("JobState") in ("PENDING", "CANCELLED"):
                pairs["ExitCode"] = ""  # of a start that was requeued, perhaps
            pairs["NumNodes"] = pairs.get("NumNodes", "").partition("-")[0]
            has_choice = pairs.get("ExcNodeList", "(null)") == "(null)"
            pairs["NodeList"] = _count_nodes(pairs.get("NodeList", "")) if has_choice else pairs["NodeList"]
            values = tuple(f"{name}={pairs.get(name, '')}" for name in SHOWN)
            times = tuple(f"{name}={_moment(pairs.get(name, ''))}" for name in TIMES)
            if pairs.get("JobState") == "PENDING":
                times = ()  # estimates
            job_id = pairs.get("JobId", "")
            if "ArrayTaskId" in pairs:
                job_id = f"{pairs['ArrayJobId']}_{pairs['ArrayTaskId']}"
            rows[self._key("scontrol", job_id, side, rows)] = self.normal("|".join((*values, *times)), side)
        return rows

    def _key(self, kind: str, job_id: str, side: int, rows: dict[str, str]) -> str:
        root, mark, task = job_id.partition("_")
        known = [number for number, job in enumerate(self.jobs) if job.roots[side] == root]
        key = f"{kind} JOB{known[0] if known else '?'}{mark}{task}"
        while key in rows:
            key += "+"
        return key


def _ids_of(text: str) -> list[str]:
    """Of tasks that waited together, each one's id."""
    root, mark, tasks = text.partition("_[")
    return [f"{root}_{task}" for task in array_indices(tasks.rstrip("]").partition("%")[0])] if mark else [text]


def _count_nodes(text: str) -> str:
    """Which of several free nodes a job gets is not compared; scontrol's names are where the job excludes one."""
    return text if text in ("", "None assigned") else f"{len(hosts_of(text))} nodes"


def _moment(text: str) -> str:
    return "T" if text.isdigit() and int(text) > 0 else text


# --- the kinds of events

Event = Callable[["Player", Known], None]


def submit_plain(p: Player, _: Known) -> None:
    p.submit()


def submit_two_nodes(p: Player, _: Known) -> None:
    p.submit("--nodes=2")


def submit_array(p: Player, _: Known) -> None:
    p.submit("--array=0-2", tasks=(0, 1, 2))


def submit_throttled_array(p: Player, _: Known) -> None:
    p.submit("--array=1-3%1", tasks=(1, 2, 3))


def submit_held(p: Player, _: Known) -> None:
    p.submit("--hold")


def submit_held_array(p: Player, _: Known) -> None:
    p.submit("--hold", "--array=0-1", tasks=(0, 1))


def submit_later(p: Player, _: Known) -> None:
    p.submit("--begin=now+3600")


def submit_without_requeue(p: Player, _: Known) -> None:
    p.submit("--no-requeue")


def submit_that_ignores_term(p: Player, _: Known) -> None:
    p.submit(suffix="i")


def submit_elsewhere(p: Player, _: Known) -> None:
    p.submit("--exclude={node0}")


def submit_short(p: Player, _: Known) -> None:
    p.submit("--time=00:05:00")


def submit_after(kind: str) -> Event:
    def event(p: Player, job: Known | None) -> None:
        p.submit(*([f"--dependency={kind}:{{{p.number(job)}}}"] if job is not None else []))

    event.__name__ = f"submit_{kind}"
    return event


def submit_after_unknown(p: Player, _: Known) -> None:
    p.submit("--dependency=afterany:999999")


def submit_on_too_many_nodes(p: Player, _: Known) -> None:
    p.submit("--nodes=3")


def submit_for_too_long(p: Player, _: Known) -> None:
    p.submit("--time=9-00:00:00")


def submit_too_large_array(p: Player, _: Known) -> None:
    p.submit("--array=0-5000", tasks=(0,))


def submit_nothing(p: Player, _: Known) -> None:
    p.both("sbatch", "--partition={partition}", "/no/such/script.sh")


def try_only(p: Player, _: Known) -> None:
    p.both("sbatch", "--test-only", "--partition={partition}", "--time=5", "{script}")


def end_well(p: Player, job: Known) -> None:
    for task in job.tasks or (None,):
        if p.is_running(job, task):
            p.end(job, task, 0)


def end_badly(p: Player, job: Known) -> None:
    code = p.draw.choice((1, 3, 85, 137))
    for task in (job.tasks or (None,))[:1]:
        if p.is_running(job, task):
            p.end(job, task, code)


def on_job(*argv: str, task: bool = False, name: str = "") -> Event:
    def event(p: Player, job: Known) -> None:
        job_id = f"{{{p.number(job)}}}"
        if task and job.tasks:
            job_id += f"_{p.draw.choice(job.tasks)}"
        p.both(*(part.replace("ID", job_id) for part in argv))

    event.__name__ = name or "_".join(part.strip("-=").replace("=", "_") for part in argv if "ID" not in part)
    event.__name__ += "_task" if task else ""
    return event


def fixed(name: str, *argv: str) -> Event:
    def event(p: Player, _: Known) -> None:
        p.both(*argv)

    event.__name__ = name
    return event


def in_turn(name: str, *commands: Sequence[str]) -> Event:
    """Several commands at once."""

    def event(p: Player, job: Known) -> None:
        for command in commands:
            p.both(*(part.replace("ID", f"{{{p.number(job)}}}") for part in command))

    event.__name__ = name
    return event


def signal_running(p: Player, job: Known) -> None:
    if p.is_running(job):
        p.both("scancel", "--signal=USR1", f"{{{p.number(job)}}}")


def lose_node(p: Player, _: Known) -> None:
    if p.on_first_node(0) == p.on_first_node(1):  # else other jobs would fail
        p.both("scontrol", "update", "NodeName={node0}", "State=DOWN", "Reason=test")


def resume_node(p: Player, _: Known) -> None:
    p.both("scontrol", "update", "NodeName={node0}", "State=RESUME")


SUBMITS: tuple[Event, ...] = (
    submit_plain, submit_plain, submit_two_nodes, submit_array, submit_array, submit_throttled_array, submit_held,
    submit_held_array, submit_later, submit_without_requeue, submit_that_ignores_term, submit_elsewhere, submit_short,
    submit_after("afterok"), submit_after("afterany"), submit_after("afternotok"), submit_after_unknown,
    submit_on_too_many_nodes, submit_for_too_long, submit_too_large_array, submit_nothing,
)  # fmt: skip
OTHERS: tuple[Event, ...] = (
    end_well, end_well, end_well, end_badly, end_badly, try_only,
    on_job("scancel", "--quiet", "ID"), on_job("scancel", "ID", task=True), on_job("scontrol", "hold", "ID"),
    on_job("scontrol", "hold", "ID", task=True), on_job("scontrol", "release", "ID"),
    on_job("scontrol", "release", "ID", task=True), on_job("scontrol", "requeue", "ID"),
    on_job("scontrol", "requeue", "ID", task=True), on_job("scontrol", "requeuehold", "ID"),
    on_job("scontrol", "update", "JobId=ID", "TimeLimit=00:20:00", name="shorten"),
    on_job("scontrol", "update", "JobId=ID", "TimeLimit=02:00:00", name="lengthen"),
    on_job("scontrol", "update", "JobId=ID", "ExcNodeList={node1}", name="exclude"),
    signal_running,
    fixed("scancel_unknown", "scancel", "--quiet", "999999"), fixed("hold_unknown", "scontrol", "hold", "999999"),
    fixed("release_unknown", "scontrol", "release", "999999"),
    fixed("requeue_unknown", "scontrol", "requeue", "999999"),
    fixed("update_unknown", "scontrol", "update", "JobId=999999", "TimeLimit=5"),
    fixed("show_unknown", "scontrol", "--oneliner", "show", "job", "999999"),
    fixed("squeue_unknown", "squeue", "--noheader", "--jobs=999999", "--format=%i"),
    fixed("sacct_unknown", "sacct", "--noheader", "--jobs=999999", "--format=JobID"),
    fixed("show_hostnames", "scontrol", "show", "hostnames", "{node0}"),
    in_turn("cancel_twice", ("scancel", "--quiet", "ID"), ("scancel", "--quiet", "ID")),
    in_turn("requeue_twice", ("scontrol", "requeue", "ID"), ("scontrol", "requeue", "ID")),
    in_turn("cancel_and_requeue", ("scancel", "--quiet", "ID"), ("scontrol", "requeue", "ID")),
    in_turn("requeue_and_cancel", ("scontrol", "requeue", "ID"), ("scancel", "--quiet", "ID")),
    in_turn("hold_and_release", ("scontrol", "hold", "ID"), ("scontrol", "release", "ID")),
    lose_node, resume_node, resume_node,
)  # fmt: skip
KINDS = sorted({event.__name__ for event in (*SUBMITS, *OTHERS)})


def shape(folder: Path) -> Shape:
    """Lanes of two nodes each; nodes of one lane have as many CPUs as no other's."""
    lanes = ", ".join(
        f'"lane{n}": {{"nodes": {NODES}, "node": {{"cpus": {8 + n}}}, "max_time": "2d"}}' for n in range(LANES)
    )
    (folder / "lanes.yaml").write_text(SITE.format(partitions=lanes))
    settings = {
        "KillWait": f"{KILL_WAIT_S:.0f}", "ReturnToService": "0", "MinJobAge": "3600",
        "AuthInfo": f"socket={os.environ['HPCJOBS_SANDBOX_ROOT']}/munge/munge.socket,cred_expire=5",
    }  # fmt: skip
    return Shape(like=str(folder / "lanes.yaml"), nodes=LANES * NODES, settings=settings)


def compare(seeds: range, *, length: int, limit_s: float) -> list[Line]:
    """Play the sequences on a sandbox of this process's own, for so long."""
    folder = Path(tempfile.mkdtemp(prefix="hpcjobs-conformance-", dir="/var/lib"))
    sandbox = sandboxes.up(shape(folder))
    pending, lines, give_up = list(seeds), list[Line](), time.monotonic() + limit_s

    def lane(number: int) -> list[Line]:
        own = folder / f"lane{number}"
        own.mkdir()
        (own / "job.sh").write_text(SCRIPT.format(folder=own))
        real, mine = Real(sandbox, number, own), list[Line]()
        while pending and time.monotonic() < give_up:
            mine += Player(pending.pop(0), real, own, length=length).play()
        return mine

    try:
        with ThreadPoolExecutor(LANES) as pool:
            for part in pool.map(lane, range(LANES)):
                lines += part
    finally:
        sandboxes.down()
        shutil.rmtree(folder, ignore_errors=True)
    return lines


def report(lines: list[Line]) -> str:
    """How many lines agree, and those that do not, by kind."""
    wrong = [line for line in lines if not line.agrees]
    kinds = Counter(line.event for line in lines)
    text = [
        (
            f"{len({line.seed for line in lines})} sequences, {len(kinds)} kinds of event, {len(lines)} lines, "
            f"{len(lines) - len(wrong)} agree ({100 * (1 - len(wrong) / max(1, len(lines))):.2f} %)"
        )
    ]
    for line in wrong:
        text += [f"seed {line.seed} step {line.step} {line.event}", f"  simulated: {line.simulated}",
                 f"  real:      {line.real}"]  # fmt: skip
    return "\n".join(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0-199")
    parser.add_argument("--length", type=int, default=8)
    parser.add_argument("--limit-s", type=float, default=3600.0)
    parser.add_argument("--least", type=float, default=0.99, help="share of lines that must agree")
    given = parser.parse_args()
    first, _, last = given.seeds.partition("-")
    lines = compare(range(int(first), int(last or first) + 1), length=given.length, limit_s=given.limit_s)
    print(report(lines))
    return not lines or sum(line.agrees for line in lines) < given.least * len(lines)


if __name__ == "__main__":
    sys.exit(main())
