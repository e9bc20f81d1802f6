"""Finds the cause of a job's failure from the facts and the log, with the evidence for it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hpcjobs.diagnosis.ends import EXIT_CODES, SIGNALS, STATES, TRAINER_EXIT_CODES, EndCause
from hpcjobs.diagnosis.fixes import add_derived, fill_fixes, fill_text, values_of
from hpcjobs.diagnosis.log import find_end, find_first_failure, find_host, select_last
from hpcjobs.diagnosis.matches import Match, choose_match, find_matches, is_of_program
from hpcjobs.diagnosis.rules.python import PROGRAM_ERROR
from hpcjobs.diagnosis.values import Diagnosis, Evidence, Failure, JobFacts, Kind, LogLine
from hpcjobs.scheduler.exit_text import describe_exit, signal_of
from hpcjobs.units import human_bytes, human_duration

TAIL_LINES = 12
_ENDED_BY_OTHERS = 15
"""SIGTERM: what others send; a cause in any rank's log says more."""
_CRASHES = {4, 6, 7, 8, 9, 11}
_BY_SLURM = {"time-limit", "step-time-limit", "preempted", "node-failed", "out-of-memory"}
"""Causes for which Slurm itself cancels a step or job."""


_ALL_RANKS = {"time-limit", "step-time-limit", "cancelled", "preempted", "deadline"}
"""Causes for which Slurm ends all ranks: none failed first."""


class _Conclusion(NamedTuple):
    """What was concluded, before its words are filled in."""

    end: EndCause
    match: Match | None = None
    rank: int | None = None
    host: str | None = None
    is_known: bool = True


def diagnose(facts: JobFacts, lines: Sequence[LogLine]) -> Diagnosis:
    """The cause of the failure, the rank and host it began at, its evidence and what to do; unknown stays unknown."""
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
        # Slurm kills all tasks of such a step: which of them srun reports first says nothing.
        best = next((match for match in matches if match.rule is best.rule and match.line.rank is not None), best)
        failure = None if best.line.rank is not None or facts.out_of_memory is not None else failure
    conclusion = _conclude(facts, failure, best)
    if conclusion.end.cause in _ALL_RANKS:  # what a rank recorded then is how it ended, not why
        failure = None
    rank, host = _place(conclusion, failure, facts)
    if host is None and rank is not None and facts.tasks_are_ranks:
        host = find_host(lines, rank)
    line = conclusion.match.line if conclusion.match else None
    values = values_of(facts, rank=rank, host=host)
    values = add_derived(values | (conclusion.match.values if conclusion.match else {}))
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
        exit_code=facts.exit_code if failure is None or failure.exit_code is None else failure.exit_code,
        signal=_signal(facts, failure),
        line=line,
        evidence=tuple(_evidence(facts, failure, best, line)),
        fix=tuple(fill_fixes(conclusion.end.fix, values, by_hpcjobs=facts.by_hpcjobs)),
        tail=tail,
        logs=facts.logs,
    )


def _ended_later(best: Match, failure: Failure, facts: JobFacts) -> bool:
    """Whether the rank of ``best`` failed first and ended later: it may hang in its exit while others lose it."""
    ranks = (best.line.rank, failure.rank)
    return facts.tasks_are_ranks and None not in ranks and ranks[0] != ranks[1] and is_of_program(best)


def _conclude(facts: JobFacts, failure: Failure | None, best: Match | None) -> _Conclusion:
    state = facts.state or ""
    of_slurm = best if best is not None and best.rule.cause in _BY_SLURM else None
    # A cancelled job was not always cancelled by somebody: srun's lines say why Slurm did it.
    if state == "CANCELLED" and of_slurm is not None:
        return _by_rule(of_slurm)
    if state in STATES:
        same_cause = best if best is not None and best.rule.cause == STATES[state].cause else None
        return _at_step(facts, STATES[state], same_cause)
    signal = _signal(facts, failure)
    # What the program survived at first is no reason for a crash.
    names_cause = best is not None and best.rule.kind is Kind.CAUSE and not (signal in _CRASHES and best.is_early)
    # Of memory the accounting knows the task; the log's lines are of any that Slurm killed with it.
    if best is not None and best.rule.cause == "out-of-memory" and facts.out_of_memory is not None:
        return _at_step(facts, _by_rule(best).end, best)
    if best is not None and names_cause and (signal in (None, _ENDED_BY_OTHERS) or _is_of(best, failure)):
        return _by_rule(best)
    if facts.out_of_memory is not None:
        return _at_step(facts, STATES["OUT_OF_MEMORY"], None)
    error = best if best is not None and best.rule.kind is Kind.ERROR else None
    if signal in SIGNALS and not (signal == _ENDED_BY_OTHERS and error):
        return _Conclusion(SIGNALS[signal], error if error and _is_of(error, failure) else None)
    code = failure.exit_code if failure is not None and failure.exit_code is not None else facts.exit_code
    # Only of our trainers: any other program gives these numbers a meaning of its own.
    trainer_codes = TRAINER_EXIT_CODES if facts.bundled_trainer else {}
    if error is not None and error.rule.cause == PROGRAM_ERROR and code in trainer_codes:
        return _Conclusion(trainer_codes[code], error if _is_of(error, failure) else None)
    if error is not None:
        return _by_rule(error)
    codes = EXIT_CODES | trainer_codes
    if code in codes:
        return _Conclusion(codes[code])
    # What a rank prints because another one failed is no cause.
    only = f"; the log shows only what followed: {best.rule.text}" if best is not None else ""
    fix = ("hpcjobs logs {job}",) if facts.by_hpcjobs else ()
    return _Conclusion(EndCause("unknown", _unknown_text(facts, failure) + only, fix), best, is_known=False)


def _by_rule(match: Match) -> _Conclusion:
    rule = match.rule
    rank = int(match.values["rank"]) if match.values.get("rank", "").isdigit() else match.line.rank
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
    elif best is not None:
        yield Evidence(f"{best.line.file}, line {best.line.number}", best.line.text.strip())
