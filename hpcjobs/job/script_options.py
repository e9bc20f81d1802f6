"""Checks what sbatch reads in a rendered script beside its job's options: lines of a template or of a text in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcjobs.errors import RequestError
from hpcjobs.job.batch_script import MARKS, MARKS_OF_OTHERS, parse_line
from hpcjobs.job.models import Job
from hpcjobs.site.sbatch import OPTIONS


def check_script(script: str, options: Sequence[str], job: Job) -> None:
    """Compare what sbatch reads in ``script`` with the job's ``options``, each as an ``#SBATCH`` line has it.

    Raises:
        RequestError: a line names another cluster, or is one of another scheduler.
    """
    if job.scheduler == "local":
        return
    for line in script.split("\n"):
        if line.startswith(MARKS_OF_OTHERS):
            raise RequestError(
                f"the script has the line {line!r}, which sbatch reads as an option of the job",
                hint="it stands in the template, or in a value of several lines: change it there",
            )
    own = {f"#SBATCH --{option}" for option in options}
    where = f"template {job.template}"
    added = [
        (line, directive.option.name)
        for line in _marked_lines(script)
        if line not in own
        for directive in parse_line(line.removeprefix(MARKS[0]).removeprefix(MARKS[1]), where)
    ]
    for line, option in added:
        if option == "clusters":
            raise RequestError(f"{where}: {line}: --clusters is refused", hint=OPTIONS["clusters"].reason)


def _marked_lines(script: str) -> Iterator[str]:
    """The lines that sbatch reads, up to the first that is neither empty nor a comment."""
    for line in script.split("\n") if script.startswith("#!") else ():
        if line.startswith(MARKS):
            yield line
        elif line.strip() and not line.lstrip().startswith("#"):
            return
