"""Asks Slurm about one job: when it would start (``sbatch --test-only``), and which files its output goes to."""

from __future__ import annotations

import glob
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from hpcjobs.errors import RequestError, SchedulerError
from hpcjobs.job.batch import is_batch_script, read_batch_script
from hpcjobs.job.models import Job
from hpcjobs.job.script import sbatch_options
from hpcjobs.processes.programs import Runner, run
from hpcjobs.scheduler.base import Estimate, Scheduler
from hpcjobs.scheduler.slurm.parse import Table, TableRow, read_shown
from hpcjobs.site.resources import is_option_where
from hpcjobs.slurm_commands import (
    check_submission,
    cluster_env,
    count_nodes_by_state,
    has_no_answer,
    hosts_of,
    list_accounted,
    question_env,
    show_job,
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
    names = {name.partition(".")[0] for name in hosts_of(alloc_nodes)}
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
        if state in _IDLE and nodes.isdecimal():
            counts[name] = counts.get(name, 0) + int(nodes)
    return max(counts.values(), default=0)


def parse_start(text: str) -> float | None:
    """Seconds since 1970 from the output of ``sbatch --test-only``; None: no estimate.

    The line is ``sbatch: Job 7 to start at TIME using ...`` on standard error. TIME is in seconds with
    SLURM_TIME_FORMAT=%s, local time where a version ignores that.
    """
    for expected in _EXPECTED_START.findall(text):
        if expected.isdigit():
            return float(expected)
        try:
            return time.mktime(time.strptime(expected, "%Y-%m-%dT%H:%M:%S"))
        except ValueError:
            continue
    return None


_SUBMISSION: Final = Table(("JobID", "JobIDRaw", "JobName", "User", "WorkDir", "SubmitLine"))
_PATTERN = re.compile(r"%(\d*)([%AajJNnstux])")
_STATED = {
    "output": re.compile(r"(?:-o|--outp?u?t?[= ])[ ]*(\S+)"),
    "error": re.compile(r"(?:-e|--err?o?r?[= ])[ ]*(\S+)"),
}
_SRUN = re.compile(r"(?:^|[\s;&|(])srun\s(?P<options>[^;&|]*)")
_OF_STEP = re.compile(r"(?:^|\s)(?:-[oe][= ]?|--(?:outp?u?t?|err?o?r?)[= ])\s*[\"']?([^\s\"']+)")
_ID_VARIABLE = re.compile(r"\$(?:SLURM_JOB_?ID\b|\{SLURM_JOB_?ID\})")
_SYMBOLS = {"t": r"(?P<rank>\d+)", "n": r"\d+"}
_DEFAULT, _DEFAULT_OF_TASK = "slurm-%j.out", "slurm-%A_%a.out"


def output_file(slurm: Scheduler, job_id: str) -> Path | None:
    """The file of job or array task ``job_id``; None: neither slurmctld nor the accounting knows it.

    slurmctld forgets a job some minutes after its end. Then the file comes from the options of the recorded sbatch
    command, or from the ``#SBATCH`` lines in the current text of its script, or is sbatch's default.
    """
    try:
        shown = read_shown(slurm.query(show_job(job_id)).splitlines()[0])
    except (SchedulerError, IndexError):
        shown = {}
    if path := TableRow(shown).name("StdOut"):
        return _expand(Path(path), job_id, {"x": shown.get("JobName"), "j": shown.get("JobId")})
    row = _submission(slurm, job_id)
    return None if row is None else _from_accounting(row, job_id)


def accounted_files(slurm: Scheduler, job_id: str) -> list[Path]:
    """The files of standard output and error of a job that slurmctld has forgotten, as far as the accounting shows."""
    row = _submission(slurm, job_id)
    if row is None:
        return []
    error = _stated_file(row.name("SubmitLine") or "", Path(row.name("WorkDir") or "."), "error")
    return [_from_accounting(row, job_id), *([_from_accounting(row, job_id, error)] if error else [])]


def find_script(slurm: Scheduler, job_id: str) -> tuple[Path, Path] | None:
    """The current batch script of a job and the job's first folder; None: no such file."""
    try:
        shown = read_shown(slurm.query(show_job(job_id)).splitlines()[0])
        folder, arguments = Path(shown.get("WorkDir") or "."), (shown.get("Command") or "").split()
    except (SchedulerError, IndexError):
        row = _submission(slurm, job_id)
        folder, arguments = Path("." if row is None else row.name("WorkDir") or "."), []
        if row is not None:
            arguments = (row.name("SubmitLine") or "").partition(" --wrap")[0].split()[1:]
    return next(((folder / argument, folder) for argument in arguments if is_batch_script(folder / argument)), None)


def files_of_steps(script: Path, *, job_id: str, name: str | None, folder: Path) -> Iterator[tuple[Path, int | None]]:
    """The files that a batch script's ``srun -o`` and ``-e`` have written, each with the rank that ``%t`` stands for.

    Names with shell variables other than ``$SLURM_JOB_ID`` are left out: only bash knows the values.
    """
    try:
        text = script.read_text(encoding="utf-8", errors="replace").replace("\\\n", " ")
    except OSError:
        return
    for line in text.splitlines():
        srun = None if line.lstrip().startswith("#") else _SRUN.search(line)
        for stated in _OF_STEP.findall(srun["options"]) if srun else []:
            pattern = _ID_VARIABLE.sub(job_id, stated)
            if "$" in pattern:
                continue
            pieces = re.split(r"%\d*([JNnst])", str(folder / pattern))
            pieces[::2] = [_fill(piece, job_id, {"x": name, "j": job_id}) for piece in pieces[::2]]
            form = "".join(
                _SYMBOLS.get(piece, ".*") if odd % 2 else re.escape(piece) for odd, piece in enumerate(pieces)
            )
            for path in sorted(glob.glob("*".join(map(glob.escape, pieces[::2])))):
                if (match := re.fullmatch(form, path)) and Path(path).is_file():
                    yield Path(path), int(match["rank"]) if match.re.groups else None


def _submission(slurm: Scheduler, job_id: str) -> TableRow | None:
    try:
        return next(_SUBMISSION.rows(slurm.query(list_accounted(*_SUBMISSION, jobs=[job_id]))), None)
    except SchedulerError:
        return None


def _from_accounting(row: TableRow, job_id: str, stated: str | None = None) -> Path:
    folder = Path(row.name("WorkDir") or ".")
    default = _DEFAULT_OF_TASK if "_" in job_id else _DEFAULT
    pattern = stated or _stated_file(row.name("SubmitLine") or "", folder, "output") or default
    names = {"x": row.name("JobName"), "u": row.name("User"), "j": row.text("JobIDRaw")}
    return _expand(folder / pattern, job_id, names)


def _stated_file(command: str, folder: Path, stream: str) -> str | None:
    """The ``--output`` or ``--error`` of a recorded sbatch command or of its script.

    Slurm records the words of the command without their quotes: the first one that is a file is taken for the script,
    unless it follows an option.
    """
    arguments = command.partition(" --wrap")[0].split()[1:]
    for number, argument in enumerate(arguments):
        if stated := _STATED[stream].match(" ".join(arguments[number : number + 2])):
            return stated[1]
        is_value = number > 0 and arguments[number - 1].startswith("-")
        if not argument.startswith("-") and not is_value and (folder / argument).is_file():
            return _file_of_script(folder / argument, stream)
    script = next((argument for argument in arguments if is_batch_script(folder / argument)), None)
    return None if script is None else _file_of_script(folder / script, stream)  # behind an option that has no value


def _file_of_script(path: Path, stream: str) -> str | None:
    try:
        directives = read_batch_script(path).directives
    except RequestError:  # no script by now, or one of a newer sbatch
        return None
    return next((d.value for d in reversed(directives) if d.option.name == stream and d.value), None)


def _expand(path: Path, job_id: str, names: Mapping[str, str | None]) -> Path:
    return Path(_fill(str(path), job_id, names))


def _fill(text: str, job_id: str, names: Mapping[str, str | None]) -> str:
    """``text`` with sbatch's replacement symbols filled in; unknown ones stay."""
    parent, _, task = job_id.partition("_")
    values = {**names, "%": "%", "A": parent, "a": task, "s": "batch", "t": "0", "n": "0"}

    def replace(match: re.Match[str]) -> str:
        value = values.get(match[2])
        if not value:
            return match[0]
        return value.zfill(min(int(match[1] or 0), 10)) if value.isdigit() else value

    return _PATTERN.sub(replace, text)
