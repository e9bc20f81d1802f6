"""Builds the local scheduler's record of a plan."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

from hpcjobs.errors import RequestError
from hpcjobs.job.models import Job, Plan
from hpcjobs.scheduler.local import gpus
from hpcjobs.scheduler.local.policy import DEPENDENCY_KINDS
from hpcjobs.scheduler.local.records import Dependency, EarlySignal, Request
from hpcjobs.site.resources import LocalEffect, fields_where
from hpcjobs.units import human_bytes, memory_bytes

GRACE_S = 30.0
_MAX_TASKS = 10_000
_JOB_ID = re.compile(r"L([1-9]\d*)(?:_(?:0|[1-9]\d*))?\Z", re.ASCII)
_ARRAY_PART = re.compile(r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?\Z", re.ASCII)
_EARLY_SIGNAL = re.compile(r"(?P<script>B:)?(?P<signal>\w+)(?:@(?P<seconds>\d+))?\Z", re.ASCII)


def job_number(job_id: str) -> int | None:
    """``L7`` and ``L7_3`` -> 7; None: no id of a local job."""
    match = _JOB_ID.match(job_id)
    return int(match[1]) if match else None


def request_for(plan: Plan, known: Callable[[str], bool]) -> Request:
    """The request, still without id. ``known``: whether a job id exists.

    Raises:
        RequestError: an option this scheduler cannot honour, more GPUs than there are, or no script.
    """
    job, resources = plan.job, plan.job.resources
    for field in fields_where("local", LocalEffect.REFUSED):
        if getattr(resources, field):
            raise RequestError(
                f"{field}={getattr(resources, field)} ({job.sources.get(field, 'default')}):"
                " jobs on this machine start as soon as its CPUs and GPUs allow, and nothing else is managed",
                hint="ask GPUs with gpus_per_node" if field == "gres" else f"leave {field} out for site {job.site}",
            )
    script = plan.run_dir / "job.sh"
    if not script.is_file():
        raise RequestError(f"no script to run at {script}")
    cpus, names = machine_cpus(), visible_gpus()
    _refuse_larger(job, cpus, names)
    array, throttle = _array(resources.array) if resources.array else (None, None)
    return Request(
        job_id="",
        name=job.name,
        run_dir=str(plan.run_dir),
        script=str(script),
        cwd=job.chdir,
        submitted=time.time(),
        cpus=cpus if resources.exclusive else job.ntasks_per_node * (resources.cpus_per_task or 1),
        gpus=job.gpus_per_node,
        machine_cpus=cpus,
        machine_gpus=len(names),
        gpu_names=names,
        grace_s=GRACE_S if (grace_s := _number("HPCJOBS_GRACE_S")) is None else float(grace_s),
        time_limit_s=job.time_limit_s,
        early_signal=_early_signal(resources.signal) if resources.signal else None,
        dependency=_dependency(resources.dependency, known) if resources.dependency else (),
        array=array,
        throttle=throttle,
    )


def _number(variable: str) -> int | None:
    """The whole number in an environment variable; None: it is not set.

    Raises:
        RequestError: another value.
    """
    text = os.environ.get(variable)
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()):
        raise RequestError(f"{variable}={text!r} (environment) is no integer", hint=f"unset {variable}")
    return int(text)


def machine_cpus() -> int:
    """CPUs to share out: HPCJOBS_LOCAL_CPUS, or those this process may run on."""
    cpus = _number("HPCJOBS_LOCAL_CPUS")
    return len(os.sched_getaffinity(0)) if cpus is None else cpus


def machine_memory() -> int:
    """Bytes of main memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def visible_gpus() -> tuple[str, ...]:
    """Names of the GPUs to share out: HPCJOBS_LOCAL_GPUS, or the devices there are; a user's choice among them."""
    return gpus.visible_gpus(os.environ, count=_number("HPCJOBS_LOCAL_GPUS"))


def _refuse_larger(job: Job, cpus: int, names: tuple[str, ...]) -> None:
    """Refuse resources that this machine lacks. More tasks than CPUs are allowed: they share them."""
    resources, memory = job.resources, machine_memory()
    if job.gpus_per_node > len(names):
        choice = gpus.user_choice(os.environ)
        why = "" if choice is None else f", chosen by {choice}"
        raise RequestError(f"{job.describe_option('gpus_per_node')}: this machine has {len(names)}{why}")
    if (resources.cpus_per_task or 1) > cpus:
        raise RequestError(f"{job.describe_option('cpus_per_task')}: this machine has {cpus}")
    per_cpu = job.ntasks_per_node * (resources.cpus_per_task or 1)
    for field, times in (("mem", 1), ("mem_per_cpu", per_cpu), ("mem_per_gpu", job.gpus_per_node)):
        value = getattr(resources, field)
        if value and memory_bytes(value) * times > memory:
            of_all = f" x {times}" if times > 1 else ""
            raise RequestError(f"{job.describe_option(field)}{of_all}: this machine has {human_bytes(memory)}")


def _array(text: str) -> tuple[tuple[int, ...], int | None]:
    """``0-3,7%2`` -> ((0, 1, 2, 3, 7), 2); ``0-15:4`` has a step."""
    body, percent, limit = text.partition("%")
    indices: set[int] = set()
    for part in body.split(","):
        match = _ARRAY_PART.match(part)
        if match is None or (percent and not (limit.isdigit() and int(limit))):
            raise RequestError(f"array={text!r} is not understood", hint="write 0-15, 1,3,5, 0-15:4 or 0-15%4")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or (last - first) // int(match[3] or 1) + len(indices) >= _MAX_TASKS:
            raise RequestError(f"array={text!r}: the range is empty, or over {_MAX_TASKS} tasks")
        indices.update(range(first, last + 1, int(match[3] or 1)))
    return tuple(sorted(indices)), int(limit) if percent else None


def _dependency(text: str, known: Callable[[str], bool]) -> tuple[Dependency, ...]:
    """``afterok:L3:L4,afterany:L5`` -> pairs; all must be met."""
    dependencies: list[Dependency] = []
    for part in text.split(","):
        kind, *job_ids = part.split(":")
        if kind not in DEPENDENCY_KINDS or not job_ids:
            raise RequestError(
                f"dependency={text!r}: {part!r} is not understood on this machine",
                hint=f"write {', '.join(f'{kind}:L7' for kind in DEPENDENCY_KINDS)}; all joined by ',' must be met",
            )
        for job_id in job_ids:
            if job_number(job_id) is None or not known(job_id):
                raise RequestError(f"dependency={text!r}: there is no local job {job_id!r}")
            dependencies.append((kind, job_id))
    return tuple(dependencies)


def _early_signal(text: str) -> EarlySignal:
    """``USR1@120``, ``B:TERM@60``, ``10``: 60 s before the time limit unless a number of seconds is given."""
    match = _EARLY_SIGNAL.match(text)
    name = match["signal"].upper().removeprefix("SIG") if match else ""
    number = int(name) if name.isdigit() else getattr(signal, f"SIG{name}", None)
    if match is None or not isinstance(number, int) or number not in signal.valid_signals():
        raise RequestError(f"signal={text!r} is not understood", hint="write USR1@60 or B:USR1@60")
    return EarlySignal(int(number), float(match["seconds"] or 60), match["script"] is not None)
