"""``hpcjobs archive`` and ``prune``: keep or remove old run folders."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated

import typer

from hpcjobs.cli.completion import complete_jobs, complete_states
from hpcjobs.cli.output import JobSite, Json, note, print_output, print_table
from hpcjobs.remote.outputs import record_output

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def archive(
    job: Annotated[str, typer.Argument(help="Id, run folder or name.", autocompletion=complete_jobs)],
    output: Annotated[
        Path | None,
        typer.Option(help="File to write [NAME_ID.tar]; .tar.gz and .tar.xz are compressed.", show_default=False),
    ] = None,
    site: JobSite = None,
    as_json: Json = False,
) -> None:
    """Write the run folder of a job that has ended to one tar file, with the checksum of every file."""
    from hpcjobs.run.archive import archive
    from hpcjobs.run.select import select_one
    from hpcjobs.units import format_count, human_bytes

    entry = select_one(job, site=site)
    written = archive(entry, output)
    record_output(written.path)
    if as_json:
        print_output("archive", {"path": str(written.path), "files": written.files, "size_bytes": written.size})
    else:
        files = format_count(written.files, "file")
        print(f"{written.path}  {files}, {human_bytes(written.size)}; sha256sum -c SHA256SUMS checks it")


_ZERO = re.compile(r"0+(\.0+)?[smhdw]?")


@app.command()
def prune(
    older_than: Annotated[
        str, typer.Option(help="Jobs that ended at least this long ago: 30d, 12h; 0s is all that have ended.")
    ] = "30d",
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state", help="Only jobs in this state: FAILED …", show_default=False, autocompletion=complete_states
        ),
    ] = None,
    larger_than: Annotated[
        str | None, typer.Option(help="Only run folders of this size or more: 1G.", show_default=False)
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove what is listed.")] = False,
    site: JobSite = None,
    as_json: Json = False,
) -> None:
    """List old run folders and records of jobs; with --remove, remove them.

    A job that waits or runs, or whose end is not known, is never removed. Sweeps keep what their results need.
    """
    from hpcjobs.cli.ps import parse_states
    from hpcjobs.errors import RequestError
    from hpcjobs.run import prune as old_jobs
    from hpcjobs.units import human_bytes, human_duration, memory_bytes, walltime_s

    try:
        age_s = 0 if _ZERO.fullmatch(older_than) else walltime_s(older_than)
    except ValueError as error:
        hint = "write 30d, 12h or 2w; 0s means every job that has ended"
        raise RequestError(f"--older-than {older_than}: not a time", hint=hint) from error
    try:
        min_size = 0 if larger_than is None else memory_bytes(larger_than)
    except ValueError as error:
        raise RequestError(f"--larger-than {larger_than}: not a size", hint="write 1G or 500M") from error
    choice = old_jobs.select_old(age_s=age_s, states=parse_states(state or []), min_size=min_size, site=site)
    chosen = old_jobs.remove(choice.old) if remove else choice.old
    total = sum(job.size for job in chosen)
    if as_json:
        rows = [
            {"job_id": job.entry.job_id, "name": job.entry.name, "states": job.states, "ended": job.ended,
             "size_bytes": job.size, "run_dir": job.entry.run_dir} for job in chosen
        ]  # fmt: skip
        print_output("prune", {"jobs": rows, "removed": remove, "size_bytes": total, "left": choice.left})
        return
    if chosen:
        print_table(
            ["JOB", "NAME", "STATE", "AGE", "SIZE", "RUN FOLDER"],
            [
                (job.entry.job_id, job.entry.name, ",".join(s.value for s in job.states) or "-",
                 human_duration(time.time() - job.ended), human_bytes(job.size), job.entry.run_dir)
                for job in chosen
            ],
        )  # fmt: skip
    done = "removed" if remove else "to remove (--remove does it)"
    print(f"{len(chosen)} job{'' if len(chosen) == 1 else 's'}, {human_bytes(total)} {done}")
    if choice.left:
        jobs = "job" if choice.left == 1 else "jobs"
        note(f"not listed: {choice.left} {jobs} of that age, still waiting, running, in use, or without a known end")
