"""``hpcjobs report``: jobs, load, scaling, sweep, advise."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from hpcjobs.cli.arguments import verb_group
from hpcjobs.cli.completion import complete_jobs, complete_states, complete_studies, complete_sweeps
from hpcjobs.cli.output import Json, SiteName, note, opt, print_output, print_table
from hpcjobs.cli.terminal import raw
from hpcjobs.errors import RequestError, nearest, require_packages
from hpcjobs.remote.connection import record_output
from hpcjobs.units import cell, format_count

if TYPE_CHECKING:
    from hpcjobs.scaling.analysis import Analysis


HEADERS: Final = {
    "JOB": "job_id", "NAME": "name", "USER": "user", "STATE": "state", "NODES": "nodes", "CPUS": "cpus", "GPUS": "gpus",
    "WAIT": "queue_wait_s", "ELAPSED": "elapsed_s", "CPU": "cpu_efficiency", "MEM": "mem_efficiency",
    "GOODPUT": "goodput", "ENERGY": "energy_j", "COST": "cost", "ADVICE": "advice",
}  # fmt: skip
"""Header -> column, in the order of the table."""
_MORE_HEADERS: Final = {"GPU": "gpu_utilization", "LIMIT": "time_limit_s", "EXIT": "exit_code"}
_WATCH_S: Final = 60.0
"""Between two tables of --watch: each asks slurmdbd."""

app = verb_group("Reports on jobs (from the accounting), scaling studies and sweeps, and what to request next time.")


@app.command()
def jobs(
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            help="Job ids, of any user; without ids the options select jobs.",
            show_default=False,
            autocompletion=complete_jobs,
        ),
    ] = None,
    site: SiteName = None,
    since: Annotated[
        str, typer.Option(help="Jobs that ended since then (7d, 12h, 2026-11-01), or have not ended.")
    ] = "7d",
    until: Annotated[
        str | None, opt("--until", help="Jobs submitted before: 2d, 2026-11-15, 2026-11-15T12:00.")
    ] = None,
    user: Annotated[list[str] | None, opt("--user", "-u", help="Jobs of this user; may be repeated [me].")] = None,
    all_users: Annotated[bool, opt("--all-users", "-a", help="Jobs of all users that sacct shows.")] = False,
    account: Annotated[str | None, opt("--account", "-A", help="Jobs of this account.")] = None,
    state: Annotated[
        list[str] | None,
        opt(
            "--state",
            help="Jobs in this state: COMPLETED, FAILED, ...; may be repeated.",
            autocompletion=complete_states,
        ),
    ] = None,
    name: Annotated[str | None, opt("--name", "-J", help="Jobs with names of this pattern: 'train-*'.")] = None,
    cluster: Annotated[
        str | None, opt("--cluster", "-M", help="Jobs of other clusters of the site's slurmdbd: a, or a,b.")
    ] = None,
    all_clusters: Annotated[bool, opt("--all-clusters", help="Jobs of all clusters of its slurmdbd.")] = False,
    by: Annotated[
        str | None,
        opt("--by", help="Sums by user, account, partition, qos, state, name or day; two with a comma: user,state."),
    ] = None,
    columns: Annotated[
        str | None, opt("--columns", help="Columns in this order: job,state,elapsed,mem_used_bytes.")
    ] = None,
    watch: Annotated[bool, opt("--watch", help="Print the table again every minute, until Ctrl-C.")] = False,
    as_json: Json = False,
    csv: Annotated[Path | None, opt("--csv", help="Write all columns to this CSV file ('-': print).")] = None,
    parquet: Annotated[Path | None, opt("--parquet", help="Write all columns to this Parquet file.")] = None,
    page: Annotated[
        Path | None, opt("--page", "-O", help="Write a page to this folder: use and waits over time, wastes (HTML).")
    ] = None,
) -> None:
    """Report on jobs from the accounting: waits, efficiencies, energy, cost, and what to request next time."""
    from hpcjobs.files import user_name
    from hpcjobs.jobstats.columns import JobFilter, check_states, parse_moment

    shown = _choose_columns(columns)
    if watch and (as_json or csv or parquet or page):
        raise RequestError("--watch prints a table", hint="leave --json, --csv, --parquet and --page out")
    if by is not None and (columns or csv or parquet or page):
        raise RequestError("--by prints sums", hint="leave --columns, --csv, --parquet and --page out")
    if cluster is not None and all_clusters:
        raise RequestError("--cluster and --all-clusters exclude each other", hint="leave one of them out")
    for path in (csv, parquet, page):
        if path is not None and not path.absolute().parent.is_dir():
            raise RequestError(f"{path} cannot be written: there is no folder {path.absolute().parent}")

    def look() -> None:
        first, last = parse_moment("--since", since), None if until is None else parse_moment("--until", until)
        if last is not None and last <= first:
            raise RequestError(f"--until {until} is not after --since {since}")
        check_states("--state", state or ())
        job_filter = JobFilter(
            since=first,
            until=last,
            users=tuple(user) if user else None if all_users or ids else (user_name(),),
            account=account,
            states=tuple(state) if state else None,
            name=name,
            job_ids=tuple(ids) if ids else None,
            cluster="all" if all_clusters else cluster,
        )
        if not (ids or csv or parquet or page) and _is_without_jobs(site):
            if as_json:
                print_output("report jobs" if by is None else "report jobs --by", [])
            else:
                print("no jobs")
            return
        require_packages("polars")
        from hpcjobs.cli import report_jobs

        if by is not None:
            report_jobs.print_sums(job_filter, site, by=by, as_json=as_json)
            return
        table = report_jobs.gather_jobs(job_filter, site)
        if page is not None:
            report_jobs.write_page(table, page, job_filter, site)
        if csv is not None or parquet is not None:
            report_jobs.write_table(table.jobs, csv=csv, parquet=parquet)
        if as_json:
            print_output("report jobs", table.jobs.to_dicts())
        elif page is None and csv is None and parquet is None:
            report_jobs.print_jobs(table.jobs, table.attempts, shown)

    while watch:
        print("\x1b[H\x1b[2J" if sys.stdout.isatty() else "", end="", file=raw(sys.stdout))
        print(time.strftime("%F %T"))
        look()
        sys.stdout.flush()
        time.sleep(_WATCH_S)
    look()


def _is_without_jobs(site: str | None) -> bool:
    """Whether the site is this machine and no job was ever submitted here; the tables need not be loaded then."""
    from hpcjobs.run import index
    from hpcjobs.site.library import site_or_cluster

    return not site_or_cluster(site).kind.has_accounting and all(entry.kind.has_accounting for entry in index.entries())


class JobColumn(NamedTuple):
    """One column of the table of jobs."""

    header: str
    name: str
    """Column of the accounting, or ``advice``."""


def _choose_columns(text: str | None) -> list[JobColumn]:
    """The columns of the table: headers in any case, or columns of the accounting.

    Raises RequestError: no column of that name.
    """
    from hpcjobs.jobstats.columns import COLUMNS

    if text is None:
        return [JobColumn(header, name) for header, name in HEADERS.items()]
    known = HEADERS | _MORE_HEADERS
    headers = {name: header for header, name in known.items()}
    chosen = []
    for part in (one.strip() for one in text.split(",")):
        name = known.get(part.upper(), part.lower())
        if name not in COLUMNS and name not in headers:
            names = [*(header.lower() for header in known), *COLUMNS]
            raise RequestError(f"--columns {part}: no such column", hint=nearest(part.lower(), names))
        chosen.append(JobColumn(headers.get(name, name.upper()), name))
    return chosen


@app.command()
def scaling(
    study: Annotated[str, typer.Argument(help="Name or file of the study.", autocompletion=complete_studies)],
    output: Annotated[Path | None, opt("--output", "-O", help="Folder of the page [NAME-report].")] = None,
    target: Annotated[float, typer.Option(help="Efficiency of the knee, between 0 and 1.")] = 0.8,
    baseline: Annotated[
        list[str] | None, opt("--baseline", help="Another study to compare with; may be repeated.")
    ] = None,
    check: Annotated[
        list[str] | None,
        opt("--check", help="Condition such as 'efficiency>=0.9 at 4', or YAML file of bounds; exit code 1 if missed."),
    ] = None,
    junit: Annotated[Path | None, opt("--junit", help="Write what --check finds as JUnit XML to this file.")] = None,
    allow_mixed: Annotated[
        bool, opt("--allow-mixed", help="Accept runs of different code, images or node models.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Report on a scaling study: table, fits and plots, also as a page (HTML, Markdown, CSV, Parquet, PNG, SVG)."""
    require_packages("polars", "matplotlib", "scipy")
    from hpcjobs.pages import page_folder
    from hpcjobs.scaling import comparison, page
    from hpcjobs.scaling.analysis import analyse, analyse_series
    from hpcjobs.scaling.runs import read_runs
    from hpcjobs.scaling.study import path_of, read

    measured_study = read(path_of(study))
    runs = read_runs(measured_study)
    series = analyse_series(runs, target=target, allow_mixed=allow_mixed)
    others = []
    for name in baseline or ():
        other = read(path_of(name))
        comparison.check_modes(measured_study, other)
        others.append((name, analyse(read_runs(other), target=target, allow_mixed=allow_mixed)))
    analysis = next(iter(series.values()))
    (label, *_), is_single = series, len(series) == 1
    compared = [(label if not is_single else measured_study.name, analysis), *list(series.items())[1:], *others]
    tables = [
        (name, comparison.compare(*((analysis, other) if name in dict(others) else (other, analysis))))
        for name, other in compared[1:]
    ]
    folder = output or page_folder(measured_study.name, "report")
    picture = comparison.draw(compared) if tables else None
    page.write(measured_study, series, runs, folder, comparisons=tables, picture=picture)
    record_output(folder)
    if as_json:
        of_series = [{"series": name, **_scaling_document(each)} for name, each in series.items() if not is_single]
        known = _scaling_document(analysis) | {"series": of_series, "page": str(folder / "index.html")}
        print_output("report scaling", known)
    else:
        for line in dict.fromkeys(line for each in series.values() for line in page.warnings(each, runs)):
            note(line)
        if not is_single:
            matrix = page.make_matrix(series)
            print_table([header.upper() for header in matrix[0]], matrix[1:])
        for name, each in series.items():
            if name:
                print(f"\n{name}")
            _print_scaling(each)
        for name, rows in tables:
            print(f"\n{name}, compared with {label}" if name in series else f"\ncompared with {name}")
            print_table([header.upper() for header in rows[0]], rows[1:])
        print(f"page {folder / 'index.html'}")
    bounds = [
        bound if is_single else bound._replace(what=f"{name}: {bound.what}")
        for text in check or ()
        for name, each in series.items()
        for bound in comparison.check(each, text)
    ]
    if junit is not None:
        comparison.write_junit(junit, measured_study.name, bounds)
        record_output(junit)
    for bound in bounds:
        (note if as_json else print)(f"{'held' if bound.held else 'MISSED'}: {bound}")
    if not all(bound.held for bound in bounds):
        raise typer.Exit(1)


def _scaling_document(analysis: Analysis) -> dict[str, Any]:
    laws = [
        {
            "law": fit.law.name,
            "rms": fit.rms,
            "chosen": fit is analysis.chosen,
            "possible": fit in analysis.possible,
            "parameters": fit.parameters,
        }
        for fit in analysis.fits
    ]
    groups = [group._asdict() for group in analysis.groups]
    return {"groups": groups, "summary": analysis.summary, "fits": laws, "knee": analysis.knee._asdict()}


def _print_scaling(analysis: Analysis) -> None:
    from hpcjobs.scaling import page

    headers, sizes = page.sizes(analysis)
    print_table([header.upper() for header in headers], sizes)
    if fits := page.fit_rows(analysis):
        print_table(["LAW", "VERDICT", "PARAMETER", "VALUE", "RESIDUALS"], fits)
    for line in analysis.summary:
        print(line)


@app.command()
def load(
    job: Annotated[
        str,
        typer.Argument(
            help="Id, array task, run folder, name, or a folder with samples.", autocompletion=complete_jobs
        ),
    ],
    site: SiteName = None,
    output: Annotated[Path | None, opt("--output", "-O", help="Folder of the page [NAME-load].")] = None,
    as_json: Json = False,
) -> None:
    """Report on the load of a job's nodes: GPU, CPU and memory over time, as a page (HTML, PNG, SVG)."""
    require_packages("polars", "matplotlib")
    from hpcjobs.jobstats import pages
    from hpcjobs.pages import page_folder
    from hpcjobs.run.progress import all_samples, monitor_files
    from hpcjobs.run.select import select_one
    from hpcjobs.run.steps import samples_dir

    alone = Path(job)
    if alone.is_dir() and monitor_files(alone):
        title, samples, facts = alone.absolute().name, alone, dict[str, str | None]()
    else:
        entry = select_one(job, site=site)
        title, samples, facts = entry.name, samples_dir(entry), pages.facts_of(entry)
    nodes = all_samples(samples)
    if not nodes:
        raise RequestError(
            f"{samples} has no samples of its nodes",
            hint="hpcjobs submit --monitor, or hpcjobs monitor while the job runs, takes some",
        )
    folder = output or page_folder(title, "load")
    count = sum(len(node.samples) for node in nodes)
    lead = f"{format_count(count, 'sample')} of {format_count(len(nodes), 'node')}, from {samples}"
    pages.write_load(f"Load of {title}", lead, nodes, folder, facts=facts)
    record_output(folder)
    measured = pages.measure_load(nodes)
    if as_json:
        print_output("report load", {"nodes": measured, "page": str(folder / "index.html")})
        return
    print_table(["NODE", "SAMPLES", "GPU", "CPU", "MEMORY"], [pages.load_cells(node) for node in measured])
    print(f"page {folder / 'index.html'}")


@app.command()
def sweep(
    name: Annotated[str, typer.Argument(help="Name or folder of the sweep.", autocompletion=complete_sweeps)],
    least: Annotated[
        str | None, opt("--min", help="Metric to compare by; the smallest is best [the figure of merit, or loss].")
    ] = None,
    most: Annotated[str | None, opt("--max", help="Metric to compare by; the largest is best.")] = None,
    output: Annotated[Path | None, opt("--output", "-O", help="Folder of the page [NAME-report].")] = None,
    as_json: Json = False,
) -> None:
    """Report on a sweep: the best parameters, as a page with plots (HTML, CSV, Parquet, PNG, SVG)."""
    require_packages("polars", "matplotlib")
    from hpcjobs.pages import page_folder
    from hpcjobs.sweeps import results_page
    from hpcjobs.sweeps.sweep import find_sweep

    measured = find_sweep(name)
    table, called = measured.table(), measured.definition.name
    usual, largest = table.usual_metric
    metric, largest = least or most or usual, most is not None or (least is None and largest)
    ranked = table.rank(metric, largest=largest)
    best = ranked[0] if ranked else None
    folder = output or page_folder(called, "report")
    results_page.write(
        called, table.rows, table.params, folder, compared=ranked, metric=metric, largest=largest,
        facts=results_page.facts_of(measured.definition),
    )  # fmt: skip
    record_output(folder)
    if as_json:
        best_cell = None if best is None else table.as_documents([best])[0]
        print_output("report sweep", {"best": best_cell, "page": str(folder / "index.html")})
        return
    if best is not None:
        columns = [*table.params, metric, "job_id"]
        headers = [*(name.upper() for name in (*table.params, metric)), "JOB"]
        print_table(headers, [[cell(best.get(name)) for name in columns]])
    print(f"page {folder / 'index.html'}")


@app.command()
def advise(
    names: Annotated[
        list[str], typer.Argument(help="Job ids, run folders, names, or a study.", autocompletion=complete_jobs)
    ],
    site: SiteName = None,
    as_json: Json = False,
) -> None:
    """Recommend memory, time, CPUs and nodes for the next job, from what was used, and estimate when it would start."""
    require_packages("polars", "scipy")
    from hpcjobs.scaling.right_size import right_size

    results = right_size(names, site=site)
    if as_json:
        print_output(
            "report advise",
            [
                {
                    "job_id": job,
                    "advice": [one._asdict() for one in result.advice],
                    "starts": result.starts._asdict() if result.starts else None,
                }
                for job, result in results.items()
            ],
        )
        return
    for job, result in results.items():
        for line in map(str, result.advice) if result.advice else ["nothing to change"]:
            print(f"{job}: {line}")
        if result.starts is not None:
            print(f"{job}: {result.starts}")
