"""Asks Slurm when a job would start, and what stands in its way (``sbatch --test-only``)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence

from hpcjobs.job.models import Job
from hpcjobs.job.options import sbatch_options
from hpcjobs.processes.programs import Runner, run
from hpcjobs.scheduler.base import Estimate
from hpcjobs.scheduler.slurm.parse import read_count, read_shown, read_time
from hpcjobs.site.resources import is_option_where
from hpcjobs.slurm_commands import (
    check_submission,
    cluster_env,
    count_nodes_by_state,
    has_no_answer,
    hosts_of,
    question_env,
    show_partitions,
)

_EXPECTED_START = re.compile(r"\bstart(?:s|ing)?(?: ?time)?(?:[:=]| at| is)\s*(\S+?)[,.;]?(?:\s|$)", re.IGNORECASE)
_EXPECTED_PARTITION = re.compile(r"\bto start at .* in partition (\S+)")
_PREFIX = re.compile(r"^(?:sbatch: )?(?:error: )?(?:allocation failure: )?")


_IDLE = ("idle", "idle~")
"""Nodes that can take a job, the second ones once they are powered up."""


def estimate_start(job: Job, *, runner: Runner = run) -> Estimate:
    """Slurm's estimate for ``job`` if it were submitted now."""
    options = [
        f"--{name}" if value is None else f"--{name}={value}"
        for name, value in sbatch_options(job)
        if not is_option_where(name, "first_run")  # Slurm has no estimate for them
    ]
    estimate = ask_sbatch([*options, "--wrap=true"], slurm_conf=job.slurm_conf, cwd=job.chdir, runner=runner)
    if "denied" in (estimate.refusal or "") and (problem := find_host_problem(job, runner=runner)) is not None:
        return Estimate(refusal=f"{estimate.refusal} ({problem})")
    return estimate


def ask_sbatch(
    args: Sequence[str], *, slurm_conf: str | None = None, cwd: str | None = None, runner: Runner = run
) -> Estimate:
    """Slurm's estimate for these arguments of sbatch: options, and a script or ``--wrap``.

    An answer that did not arrive is no refusal: the estimate has neither, and a message.
    """
    answer = runner(check_submission(*args), cwd=cwd, env=question_env(slurm_conf))
    if answer.code == 0:
        lines = [line.removeprefix("sbatch: ").strip() for line in answer.err.splitlines()]
        messages = tuple(line for line in lines if line and parse_start(line) is None and not line.startswith("Job "))
        text = f"{answer.err}\n{answer.out}"
        partition = _EXPECTED_PARTITION.search(text)
        return Estimate(parse_start(text), messages=messages, partition=partition[1] if partition else None)
    lines = [line for line in (answer.err or answer.out).splitlines() if line.strip()]
    # A plugin of the site (job_submit) prints its reason before sbatch's own line.
    texts = dict.fromkeys(text for line in lines if (text := _PREFIX.sub("", line.strip())))
    reason = "; ".join(texts) if texts else f"sbatch ended with exit code {answer.code}"
    if has_no_answer(answer.code, reason):
        return Estimate(messages=(f"Slurm did not answer: {reason}",))
    return Estimate(refusal=reason)


def submit_host_problem(alloc_nodes: str, host: str) -> str | None:
    """Why ``host`` may not submit to a partition with these AllocNodes, as scontrol prints them; None: it may."""
    if alloc_nodes.upper() in ("", "ALL", "(NULL)"):
        return None
    try:
        names = {name.partition(".")[0] for name in hosts_of(alloc_nodes)}
    except ValueError:  # no list of hosts: Slurm decides
        return None
    if (host := host.partition(".")[0]) in names:
        return None
    return f"AllocNodes={alloc_nodes}: jobs are submitted from these hosts, and this is {host}"


def find_host_problem(job: Job, *, runner: Runner = run) -> str | None:
    """Why all partitions of ``job`` refuse jobs from this host; None: one accepts them, or unknown."""
    env = cluster_env(job.slurm_conf)
    problems = []
    for name in (job.resources.partition or "").split(","):
        answer = runner(show_partitions(name), env=env) if name else None
        if answer is None or answer.code != 0:
            return None
        if (problem := submit_host_problem(read_shown(answer.out).get("AllocNodes", ""), os.uname().nodename)) is None:
            return None
        problems.append(f"partition {name}: {problem}")
    return "; ".join(problems)


def count_idle_nodes(partition: str | None, *, env: Mapping[str, str] | None, runner: Runner = run) -> int:
    """Nodes of one of these partitions that are idle now, neither planned for another job nor reserved."""
    answer = runner(count_nodes_by_state(partition), env=env)
    counts: dict[str, int] = {}
    for line in answer.out.splitlines() if answer.code == 0 else ():
        name, nodes, state = [*line.split(), "", "", ""][:3]
        if state in _IDLE:
            counts[name] = counts.get(name, 0) + (read_count(nodes) or 0)
    return max(counts.values(), default=0)


def parse_start(text: str) -> float | None:
    """Seconds since 1970 from the output of ``sbatch --test-only``; None: no estimate.

    The line is ``sbatch: Job 7 to start at TIME using ...`` on standard error. TIME is in seconds with
    SLURM_TIME_FORMAT=%s, local time where a version ignores that.
    """
    for expected in _EXPECTED_START.findall(text):
        if (moment := read_time(expected)) is not None:
            return moment
        try:
            return time.mktime(time.strptime(expected, "%Y-%m-%dT%H:%M:%S"))
        except ValueError:
            continue
    return None
