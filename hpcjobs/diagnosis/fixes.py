"""Fills in the fixes of rules with what is known of the job, so that a fix is a command that can be run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping

from hpcjobs.diagnosis.values import JobFacts
from hpcjobs.units import human_bytes, human_duration, slurm_time

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
# Modules whose package has another name.
_PACKAGES = {
    "cv2": "opencv-python", "PIL": "pillow", "yaml": "pyyaml", "sklearn": "scikit-learn", "skimage": "scikit-image",
    "google": "protobuf", "mpi4py.MPI": "mpi4py", "pynvml": "nvidia-ml-py",
}  # fmt: skip


def values_of(facts: JobFacts, *, rank: int | None, host: str | None) -> dict[str, str]:
    """What rules may name of the job itself; what is not known is left out."""
    memory, limit = facts.mem_per_node_bytes, facts.time_limit_s
    known = {
        "job": facts.job_id,
        "site": facts.site,
        "host": host,
        "nodes": ",".join(facts.nodes) or None,
        "rank": None if rank is None else str(rank),
        "run_dir": None if facts.run_dir is None else shlex.quote(facts.run_dir),
        "requested_memory": f", {human_bytes(memory)} per node" if memory else None,
        "more_memory": f"{-(-memory * 2 >> 20)}M" if memory else "TWICE_AS_MUCH",
        "time_limit": f" of {human_duration(limit)}" if limit else None,
        "more_time": slurm_time(int(limit * 2)) if limit else "LONGER",
        "failed_node": f": {', '.join(facts.failed_nodes)}" if facts.failed_nodes else (f": {host}" if host else None),
        "canceller": f" by {facts.cancelled_by}" if facts.cancelled_by else None,
        "python": "python",
    }
    return {name: value for name, value in known.items() if value is not None}


def add_derived(values: Mapping[str, str]) -> dict[str, str]:
    """``values`` with the names that follow from a rule's own."""
    derived = dict(values)
    if module := values.get("module"):
        derived["package"] = _PACKAGES.get(module, _PACKAGES.get(module.split(".")[0], module.split(".")[0]))
    if file := values.get("file"):
        derived["of_file"] = f": {file}"
    return derived


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
    """``fix`` as a command for the job: ``{again}`` submits it once more. What is not known stays in capitals."""
    command, comment_mark, comment = fix.partition("  # ")
    is_resubmission = "{again}" in command
    filled = _PLACEHOLDER.sub(lambda match: _value(match[1], values, by_hpcjobs), command)
    if is_resubmission and not by_hpcjobs:
        filled = _for_sbatch(filled) + " SCRIPT"
    return filled + comment_mark + _PLACEHOLDER.sub(lambda match: values.get(match[1], match[1].upper()), comment)


def _value(name: str, values: Mapping[str, str], by_hpcjobs: bool) -> str:
    if name == "again":
        return f"hpcjobs rerun {values.get('job', 'JOB')}" if by_hpcjobs else "sbatch"
    return values.get(name, name.upper())


def _for_sbatch(command: str) -> str:
    """Options of hpcjobs as those of sbatch."""
    variables = re.findall(r" --env (\S+)", command)
    command = re.sub(r" --env \S+", "", command)
    command = re.sub(r" --retries \S+", " --requeue", command)
    return command + (f" --export=ALL,{','.join(variables)}" if variables else "")
