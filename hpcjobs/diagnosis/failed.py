"""Concludes why a job failed: causes by state, signal, exit code and log, with fixes as commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from hpcjobs import gpu_errors
from hpcjobs.diagnosis.log import (
    find_crash_report,
    find_end,
    find_first_failure,
    find_host,
    find_memory_kills,
    has_other_ranks,
    select_last,
)
from hpcjobs.diagnosis.matches import Match, choose_match, find_matches, is_independent, is_of_program
from hpcjobs.diagnosis.rules.system import PROGRAM_ERROR
from hpcjobs.diagnosis.values import Diagnosis, Evidence, Failure, JobFacts, Kind, LogLine
from hpcjobs.job.environment import OTHER_ENVIRONMENTS, find_private_installer
from hpcjobs.record.values import read_count
from hpcjobs.scheduler.base import describe_exit, signal_of
from hpcjobs.units import human_bytes, human_duration, slurm_time


class EndCause(NamedTuple):
    """The cause of an end, its text and its fixes; both have the placeholders of rules."""

    cause: str
    text: str
    fix: tuple[str, ...] = ()
    certain: bool = True


STATES: dict[str, EndCause] = {
    "TIMEOUT": EndCause(
        "time-limit",
        "The job reached its time limit{time_limit}",
        ("{again} --time {more_time}", "{again} --retries timeout=3  # where the program saves checkpoints"),
    ),
    "DEADLINE": EndCause("deadline", "The job could not end before its deadline", ("{again} --time SHORTER",)),
    "OUT_OF_MEMORY": EndCause(
        "out-of-memory",
        "The tasks used more memory than the job had{requested_memory}",
        ("{again} --mem {more_memory}",),
    ),
    "NODE_FAIL": EndCause("node-failed", "A node failed{failed_node}", ("{again} --exclude {host}",)),
    "BOOT_FAIL": EndCause("node-failed", "A node did not start{failed_node}", ("{again} --exclude {host}",)),
    "LAUNCH_FAILED": EndCause(
        "node-failed", "Slurm could not start the job on its nodes", ("{again} --exclude {nodes}",)
    ),
    "PREEMPTED": EndCause("preempted", "The job was preempted: another job took its nodes", ("{again} --retries on",)),
    "REVOKED": EndCause("revoked", "The job was revoked: it started on another cluster of the federation"),
    "CANCELLED": EndCause("cancelled", "The job was cancelled{canceller}", ("{again}",)),
}
"""By Slurm's state of the job."""

SIGNALS: dict[int, EndCause] = {
    2: EndCause("interrupted", "Ended by SIGINT: somebody pressed Ctrl-C, or sent it by scancel --signal=INT",
                certain=False),
    4: EndCause("illegal-instruction", "Killed by an illegal instruction: the program is built for another CPU",
                ("lscpu  # on the node; build for the oldest CPU of the partition, or use --constraint",)),
    6: EndCause("aborted", "The program aborted itself (SIGABRT)",
                ("hpcjobs logs {job}  # the lines before it say why",)),
    7: EndCause("bus-error", "Killed by a bus error: often a full /dev/shm, or a file that was cut short while in use",
                ("df -h /dev/shm  # on the node",), certain=False),
    8: EndCause("arithmetic-error", "Killed by an arithmetic error in compiled code (SIGFPE)"),
    9: EndCause("killed", "Killed by signal 9 (SIGKILL); nothing records by whom. Often the node was out of memory",
                ("hpcjobs report advise {job}  # its peak memory", "{again} --mem {more_memory}"), certain=False),
    11: EndCause("segmentation-fault", "Killed by a segmentation fault: a memory error in compiled code",
                 ("{again} --env PYTHONFAULTHANDLER=1  # prints where",)),
    15: EndCause("terminated", "Ended by SIGTERM, which neither the scheduler's state nor the log explains",
                 certain=False),
    24: EndCause("cpu-time-limit", "Killed at its limit of CPU time (ulimit -t)", ("ulimit -t  # in the job",)),
    25: EndCause("file-too-large", "Killed at the largest size of a file that is allowed (ulimit -f)",
                 ("ulimit -f  # in the job",)),
}  # fmt: skip
"""By the signal that killed the rank that failed first."""

EXIT_CODES: dict[int, EndCause] = {
    126: EndCause("not-executable", "The program cannot be executed (exit code 126)",
                  ("ls -l PROGRAM",), certain=False),
    127: EndCause("command-missing", "The program, or one that it starts, does not exist on the node (exit code 127)",
                  ("command -v PROGRAM  # on the node",), certain=False),
}  # fmt: skip
"""By exit code, as shells use it."""

TRAINER_EXIT_CODES: dict[int, EndCause] = {
    2: EndCause("usage-error", "The trainer does not accept a flag or a variable of its environment: {message}",
                ("hpcjobs logs {job}",)),
    10: EndCause("world-size", "The processes that started are not the world that the job requested",
                 ("srun --mpi=list ; hpcjobs sites show {site}",)),
    11: EndCause("rendezvous-timeout", "The ranks did not find each other", ("hpcjobs fabric --site {site}",)),
    12: EndCause("out-of-memory", "The device or the node had not enough memory",
                 ("hpcjobs logs {job}  # names which: a GPU needs a smaller batch, the node more --mem",)),
    13: EndCause("not-a-number", "The loss became infinite or no number", ("a smaller learning rate, or clipping",)),
    14: EndCause("file-missing", "A file or folder of data does not exist on the node"),
    15: EndCause("data-unreadable", "A file of data cannot be read as what it should be"),
    16: EndCause("data-differs", "The ranks see different data"),
    17: EndCause("checkpoint-unusable", "No checkpoint can be loaded", ("ls -l {run_dir}/checkpoints",)),
    18: EndCause("peer-lost", "Another rank was lost in the middle of the run", ("hpcjobs fabric --site {site}",)),
    19: EndCause("standstill", "No rank made a step for too long", ("hpcjobs fabric --site {site}",)),
    20: EndCause("disk-full", "The run folder could not be written any more", ("df -h {run_dir} ; quota -s",)),
    22: EndCause("gpu-broken", gpu_errors.BROKEN.text, ("{again} --exclude {host}  # and tell the administrators",)),
    23: EndCause("gpu-configuration", "GPUs, ranks, network interface or versions of NCCL do not fit together",
                 ("hpcjobs logs {job}  # names what does not fit",)),
    21: EndCause("image-failed", "The container image cannot be started on the node",
                 ("hpcjobs container check IMAGE",)),
}  # fmt: skip
"""By exit code of the bundled trainers (docs/trainers.md)."""

_ADVICE = frozenset({"install", "other_python"})
"""Placeholders that stand for whole sentences or commands; all others are words of a command."""
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
# Modules with another name than their package.
_PACKAGES = {
    "cv2": "opencv-python", "PIL": "pillow", "yaml": "pyyaml", "sklearn": "scikit-learn", "skimage": "scikit-image",
    "google": "protobuf", "mpi4py.MPI": "mpi4py", "pynvml": "nvidia-ml-py",
}  # fmt: skip


def values_of(facts: JobFacts, *, rank: int | None, host: str | None) -> dict[str, str]:
    """Values of placeholders about the job itself, without unknown ones."""
    memory, limit = facts.mem_per_node_bytes, facts.time_limit_s
    known = {
        "job": (facts.job_id or "").partition("_[")[0] or None,
        "site": facts.site,
        "host": host,
        "nodes": ",".join(facts.nodes) or None,
        "rank": None if rank is None else str(rank),
        "run_dir": facts.run_dir,
        "requested_memory": f", {human_bytes(memory)} per node" if memory else None,
        "more_memory": f"{-(-memory * 2 >> 20)}M" if memory else "TWICE_AS_MUCH",
        "time_limit": f" of {human_duration(limit)}" if limit else None,
        "more_time": slurm_time(int(limit * 2)) if limit else "LONGER",
        "failed_node": f": {', '.join(facts.failed_nodes)}" if facts.failed_nodes else (f": {host}" if host else None),
        "canceller": f" by {facts.cancelled_by}" if facts.cancelled_by else None,
        "python": facts.python or "python",
        "image": facts.image,
        "other_python": OTHER_ENVIRONMENTS + ("; or --container IMAGE" if facts.by_hpcjobs else ""),
    }
    return {name: value for name, value in known.items() if value is not None}


def add_derived(values: Mapping[str, str]) -> dict[str, str]:
    """``values`` with the names that follow from a rule's own."""
    derived = dict(values)
    if module := values.get("module"):
        package = _PACKAGES.get(module, _PACKAGES.get(module.split(".")[0], module.split(".")[0]))
        derived["package"], derived["install"] = package, _installation(package, values)
    if file := values.get("file"):
        derived["of_file"] = f": {file}"
    return derived


def _installation(package: str, values: Mapping[str, str]) -> str:
    """How the Python of the job gets ``package``: by pip only where that Python is the user's."""
    if image := values.get("image"):
        return f"add {package} to the recipe of the image {image}, and build it again: hpcjobs container build"
    python = values["python"]
    if find_private_installer(python) is not None:
        return f"the job ran with {python}, the environment of hpcjobs itself: name your own with {package} for jobs"
    return f"{shlex.join([python, '-m', 'pip', 'install', package])}  # the Python of the job"


def fill_text(text: str, values: Mapping[str, str]) -> str:
    """``text`` with its placeholders filled; one that is not known is left out, with the space before it."""
    filled = _PLACEHOLDER.sub(lambda match: values.get(match[1], ""), text)
    return re.sub(r"\s+", " ", filled).strip().rstrip(":").rstrip()


def fill_fixes(fixes: Iterable[str], values: Mapping[str, str], *, by_hpcjobs: bool) -> Iterator[str]:
    """The fixes that can be followed: of another job without commands and options that only hpcjobs' own have."""
    for fix in fixes:
        command, comment_mark, comment = fix.partition("  # ")
        if not by_hpcjobs and " --container " in command:
            yield comment.removeprefix("or ")
            continue
        parts = [part for part in command.split(" ; ") if by_hpcjobs or _can_be_run(part, values)]
        if parts:
            yield fill_fix(" ; ".join(parts) + comment_mark + comment, values, by_hpcjobs=by_hpcjobs)


def _can_be_run(command: str, values: Mapping[str, str]) -> bool:
    """Whether it needs no job or site of hpcjobs."""
    return not (command.startswith("hpcjobs ") and _PLACEHOLDER.search(command)) or command == "hpcjobs logs {job}"


def fill_fix(fix: str, values: Mapping[str, str], *, by_hpcjobs: bool) -> str:
    """``fix`` as a command for the job: ``{again}`` submits it once more. An unknown placeholder stays, in capitals."""
    command, comment_mark, comment = fix.partition("  # ")
    is_resubmission = "{again}" in command
    filled = _PLACEHOLDER.sub(lambda match: _value(match[1], values, by_hpcjobs), command)
    if is_resubmission and not by_hpcjobs:
        filled = _for_sbatch(filled) + " SCRIPT"
    return filled + comment_mark + comment  # as it is: an interactive zsh runs what is behind `#`


def _value(name: str, values: Mapping[str, str], by_hpcjobs: bool) -> str:
    if name == "again":
        return f"hpcjobs rerun {values.get('job', 'JOB')}" if by_hpcjobs else "sbatch"
    if name not in values or values[name].startswith("-"):  # it would be an option of the command
        return name.upper()
    return values[name] if name in _ADVICE else shlex.quote(values[name])  # of a log: anybody's text


def _for_sbatch(command: str) -> str:
    """Translate options of hpcjobs to options of sbatch."""
    variables = re.findall(r" --env (\S+)", command)
    command = re.sub(r" --env \S+", "", command)
    command = re.sub(r" --retries \S+", " --requeue", command)
    return command + (f" --export=ALL,{','.join(variables)}" if variables else "")


_OF_OWN_JOBS = re.compile(r"\{again\}|hpcjobs (?:report|rerun) ")
"""Commands that refuse a folder whose job this user has not submitted, or know nothing of it."""
TAIL_LINES = 12
_ENDED_BY_OTHERS = 15
"""SIGTERM: sent by another process; a cause in any rank's log is more precise."""
_CRASHES = {4, 6, 7, 8, 9, 11}
_OF_HARDWARE = _CRASHES - {6}
"""No exception ends a program by these: an error before them is a cause, but not the only possible one."""
_BY_SLURM = {"time-limit", "step-time-limit", "preempted", "node-failed", "out-of-memory"}
"""Slurm itself cancels a step or job for these causes."""
_ALL_RANKS = {"time-limit", "step-time-limit", "cancelled", "preempted", "deadline"}
"""Slurm ends all ranks for these causes: no rank failed first."""


class _Conclusion(NamedTuple):
    """A conclusion before its placeholders are filled in."""

    end: EndCause
    match: Match | None = None
    rank: int | None = None
    host: str | None = None
    is_known: bool = True
    line: LogLine | None = None
    """The line that matters where no rule explains one."""


def diagnose(facts: JobFacts, lines: Sequence[LogLine]) -> Diagnosis:
    """Conclude the cause of the failure, its rank, host, evidence and fixes; unknown stays unknown."""
    if has_other_ranks(lines):
        facts = msgspec.structs.replace(facts, tasks_are_ranks=False)
    failure = facts.failure or find_first_failure(lines, tasks_are_ranks=facts.tasks_are_ranks)
    first_rank = None if failure is None else failure.rank
    matches = list(find_matches(lines))
    best = choose_match(matches, first_rank, lines)
    if best is not None and failure is not None and _ended_later(best, failure, facts):
        rank = best.line.rank
        assert rank is not None
        failure = find_end(lines, rank) or Failure(f"{best.line.file}, line {best.line.number}", rank)
        first_rank = rank
    if best is not None and best.rule.cause == "out-of-memory" and facts.failure is None:
        # Slurm kills all tasks of such a step: srun's order of reporting them has no meaning.
        best = next((match for match in matches if match.rule is best.rule and match.line.rank is not None), best)
        killed = find_memory_kills(lines) if facts.tasks_are_ranks else []
        if best.line.rank is not None or facts.out_of_memory is not None:
            failure = find_end(lines, best.line.rank) if best.line.rank is not None else None
        elif killed:
            failure = killed[0] if len({each.host for each in killed}) == 1 else None
        victim = best.line.rank if best.line.rank is not None else failure.rank if failure is not None else None
        if any(is_independent(match, of=victim, first=first_rank) for match in matches):
            best = best._replace(is_doubtful=True)
    conclusion = _conclude(facts, failure, best, lines)
    failure = _failure_of(conclusion, failure, facts, lines)
    rank, host = _place(conclusion, failure, facts)
    if host is None and rank is not None and facts.tasks_are_ranks:
        host = find_host(lines, rank)
    line = conclusion.match.line if conclusion.match else conclusion.line
    values = values_of(facts, rank=rank, host=host)
    values = add_derived(values | (conclusion.match.values if conclusion.match else {}))
    fixes = conclusion.end.fix
    if not facts.is_own:
        fixes = tuple(f.replace("logs {job}", "logs {run_dir}") for f in fixes if not _OF_OWN_JOBS.search(f))
    is_known = conclusion.is_known
    tail = () if is_known and line is not None else tuple(select_last(lines, first_rank, TAIL_LINES))
    return Diagnosis(
        job_id=facts.job_id,
        name=facts.name,
        state=facts.state,
        cause=conclusion.end.cause if is_known else None,
        text=fill_text(conclusion.end.text, values),
        certain=is_known and conclusion.end.certain,
        rank=rank,
        host=host,
        exit_code=facts.exit_code if failure is None or not _has_end(failure) else failure.exit_code,
        signal=_signal(facts, failure),
        line=line,
        evidence=tuple(_evidence(facts, failure, best, line)),
        fix=tuple(fill_fixes(fixes, values, by_hpcjobs=facts.by_hpcjobs)),
        tail=tail,
        logs=facts.logs,
    )


def _has_end(failure: Failure) -> bool:
    return failure.exit_code is not None or failure.signal is not None


def _failure_of(
    conclusion: _Conclusion, failure: Failure | None, facts: JobFacts, lines: Sequence[LogLine]
) -> Failure | None:
    """The end of the rank that the conclusion names, where another one was reported first."""
    if failure is None or conclusion.end.cause in _ALL_RANKS:  # a rank's record then has the signal, not the cause
        return None
    rank = conclusion.rank
    if rank is None or failure.rank in (None, rank) or not facts.tasks_are_ranks:
        return failure
    return find_end(lines, rank)


def _ended_later(best: Match, failure: Failure, facts: JobFacts) -> bool:
    """Whether the rank of ``best`` failed first and ended later: it may hang in its exit while others lose it."""
    ranks = (best.line.rank, failure.rank)
    return facts.tasks_are_ranks and None not in ranks and ranks[0] != ranks[1] and is_of_program(best)


def _conclude(
    facts: JobFacts, failure: Failure | None, best: Match | None, lines: Sequence[LogLine] = ()
) -> _Conclusion:
    state = facts.state or ""
    of_slurm = best if best is not None and best.rule.cause in _BY_SLURM else None
    # Slurm itself may have cancelled a job: srun's lines give the reason.
    if state == "CANCELLED" and of_slurm is not None:
        return _by_rule(of_slurm)
    if state in STATES:
        same_cause = best if best is not None and best.rule.cause == STATES[state].cause else None
        return _at_step(facts, STATES[state], same_cause)
    signal = _signal(facts, failure)
    # An error that the program survived does not explain a crash.
    survived = best is not None and signal in _CRASHES and (best.is_early or not (signal in (6, 9) or best.may_crash))
    names_cause = best is not None and best.rule.kind is Kind.CAUSE and not survived
    # Of memory the accounting knows the task; the log's lines are of any that Slurm killed with it.
    if best is not None and best.rule.cause == "out-of-memory" and facts.out_of_memory is not None:
        return _at_step(facts, _by_rule(best).end, best)
    if best is not None and names_cause and (signal in (None, _ENDED_BY_OTHERS) or _is_of(best, failure)):
        doubtful = best.is_doubtful or (signal in _OF_HARDWARE and not best.is_report)
        return _by_rule(best._replace(is_doubtful=doubtful))
    if facts.out_of_memory is not None:
        return _at_step(facts, STATES["OUT_OF_MEMORY"], None)
    error = best if best is not None and best.rule.kind is Kind.ERROR else None
    own = error if error is not None and _is_of(error, failure) and not error.is_early else None
    if signal in _CRASHES and own is not None and own.raised:
        return _by_rule(own._replace(is_doubtful=True))  # often a crash at the exit follows an exception
    if signal in SIGNALS and not (signal == _ENDED_BY_OTHERS and error):
        report = find_crash_report(lines, failure.rank, signal) if failure is not None else None
        return _Conclusion(SIGNALS[signal], own, line=report)
    code = failure.exit_code if failure is not None and failure.exit_code is not None else facts.exit_code
    # Only for the bundled trainers: other programs use these numbers for other errors.
    trainer_codes = TRAINER_EXIT_CODES if facts.bundled_trainer else {}
    if error is not None and error.rule.cause == PROGRAM_ERROR and code in trainer_codes:
        return _Conclusion(trainer_codes[code], error if _is_of(error, failure) else None)
    if error is not None:
        return _by_rule(error)
    codes = EXIT_CODES | trainer_codes
    if code in codes:
        return _Conclusion(codes[code])
    # A consequence of another rank's failure is not a cause.
    only = f"; the log shows only what followed: {best.rule.text}" if best is not None else ""
    fix = ("hpcjobs logs {job}",) if facts.by_hpcjobs else ()
    if (facts.decision or "").startswith("ended: "):
        only += f"; hpcjobs {facts.decision}"
    return _Conclusion(EndCause("unknown", _unknown_text(facts, failure) + only, fix), best, is_known=False)


def _by_rule(match: Match) -> _Conclusion:
    rule = match.rule
    named = read_count(match.values.get("rank", ""), digits=6)
    rank = match.line.rank if named is None else named
    host = match.values.get("host") or match.line.host
    certain = rule.certain and not match.is_doubtful and not match.is_quoted
    return _Conclusion(EndCause(rule.cause, rule.text, rule.fix, certain), match, rank, host)


def _at_step(facts: JobFacts, end: EndCause, match: Match | None) -> _Conclusion:
    """An end that Slurm reports: at the task of the accounting's step, or where a line of the log says."""
    if end.cause == "out-of-memory" and (step := facts.out_of_memory) is not None:
        return _Conclusion(end, match, step.task if facts.tasks_are_ranks else None, step.node)
    if end.cause == "node-failed":
        host = (match.values.get("host") if match else None) or next(iter(facts.failed_nodes), None)
        return _Conclusion(end, match, None, host)
    return _Conclusion(end, match)


def _is_of(match: Match, failure: Failure | None) -> bool:
    """Whether the rank that failed first printed it, as far as the log tells ranks apart."""
    return failure is None or match.line.rank in (None, failure.rank)


def _place(conclusion: _Conclusion, failure: Failure | None, facts: JobFacts) -> tuple[int | None, str | None]:
    """Rank and host of the failure."""
    if conclusion.end.cause in _ALL_RANKS:
        return None, None
    rank, host = conclusion.rank, conclusion.host
    if conclusion.end.cause == "node-failed":
        return None, host
    if rank is None and failure is not None:
        rank = failure.rank
    if host is None and failure is not None and failure.rank == rank:
        host = failure.host
    return rank, host or _host_of(rank, facts)


def _host_of(rank: int | None, facts: JobFacts) -> str | None:
    """The host of a rank: ranks fill one node after the other."""
    if len(facts.nodes) == 1:
        return facts.nodes[0]
    if rank is None or not facts.ranks_per_node or rank >= len(facts.nodes) * facts.ranks_per_node:
        return None
    return facts.nodes[rank // facts.ranks_per_node]


def _signal(facts: JobFacts, failure: Failure | None) -> int | None:
    if failure is not None and (failure.exit_code is not None or failure.signal is not None):
        return signal_of(failure.exit_code, failure.signal)
    return signal_of(facts.exit_code, facts.signal)


def _unknown_text(facts: JobFacts, failure: Failure | None) -> str:
    if failure is not None:
        who = " ".join(filter(None, [f"rank {failure.rank}" if failure.rank is not None else "a rank",
                                     f"on {failure.host}" if failure.host else ""]))  # fmt: skip
        end = describe_exit(failure.exit_code, failure.signal)
        return f"Unknown: {who} ended first, {end}, and no line of the log explains it"
    end = describe_exit(facts.exit_code, facts.signal)
    return f"Unknown{f': {end}' if end else ''}; no line of the log explains it"


def _evidence(facts: JobFacts, failure: Failure | None, best: Match | None, line: LogLine | None) -> Iterator[Evidence]:
    if facts.state is not None:
        arguments = [f"state {facts.state}", describe_exit(facts.exit_code, facts.signal)]
        arguments.append(f"reason {facts.reason}" if facts.reason else "")
        yield Evidence(facts.source or "scheduler", ", ".join(filter(None, arguments)))
    if facts.elapsed_s is not None and facts.time_limit_s is not None and facts.state == "TIMEOUT":
        text = f"ran {human_duration(facts.elapsed_s)} of {human_duration(facts.time_limit_s)}"
        yield Evidence(facts.source or "scheduler", text)
    if (step := facts.out_of_memory) is not None:
        used = f", a task used {human_bytes(step.max_rss_bytes)}" if step.max_rss_bytes else ""
        place = f" on {step.node}" if step.node else ""
        limit = f" of {human_bytes(facts.mem_per_node_bytes)} per node" if facts.mem_per_node_bytes else ""
        yield Evidence("sacct", f"step {step.name} {step.state}{used}{limit}{place}")
    if facts.failed_nodes:
        yield Evidence("Slurm's events of nodes", f"failed: {', '.join(facts.failed_nodes)}")
    if failure is not None:
        who = "" if failure.rank is None else f" rank {failure.rank}"
        host = f" on {failure.host}" if failure.host else ""
        end = describe_exit(failure.exit_code, failure.signal)
        yield Evidence(failure.source, f"first failure:{who}{host}" + (f", {end}" if end else ""))
    if line is not None:
        yield Evidence(f"{line.file}, line {line.number}", line.text.strip())
    elif best is not None and not best.is_early:  # the program survived early errors
        yield Evidence(f"{best.line.file}, line {best.line.number}", best.line.text.strip())
