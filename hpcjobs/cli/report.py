"""``hpcjobs report``: jobs, load, scaling, sweep, advise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcjobs.cli import report_jobs
from hpcjobs.cli.arguments import VerbGroup
from hpcjobs.cli.completion import complete_jobs, complete_studies, complete_sweeps
from hpcjobs.cli.output import Json, SiteName, note, opt, print_output, print_table
from hpcjobs.errors import RequestError
from hpcjobs.extras import require_packages
from hpcjobs.remote.outputs import record_output
from hpcjobs.units import format_count

if TYPE_CHECKING:
    from hpcjobs.scaling.analysis import Analysis


app = typer.Typer(cls=VerbGroup, rich_markup_mode=None, add_completion=False, no_args_is_help=True)
app.command()(report_jobs.jobs)


@app.callback()
def report() -> None:
    """Reports on jobs (from the accounting), scaling studies and sweeps, and what to request next time."""


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
        bool, typer.Option("--allow-mixed", help="Accept runs of different code, images or node models.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Report on a scaling study: table, fits and plots, also as a page (HTML, Markdown, CSV, Parquet, PNG, SVG)."""
    require_packages("polars", "matplotlib", "scipy")
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
    folder = output or Path(f"{measured_study.name}-report")
    picture = comparison.draw(compared) if tables else None
    matrix = comparison.make_matrix(list(series.items())) if not is_single else None
    page.write(measured_study, series, runs, folder, comparisons=tables, picture=picture, matrix=matrix)
    record_output(folder)
    if as_json:
        of_series = [{"series": name, **_scaling_document(each)} for name, each in series.items() if not is_single]
        known = _scaling_document(analysis) | {"series": of_series, "page": str(folder / "index.html")}
        print_output("report scaling", known)
    else:
        for line in dict.fromkeys(line for each in series.values() for line in page.warnings(each, runs)):
            note(line)
        if matrix is not None:
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
    from hpcjobs.jobstats import load_page
    from hpcjobs.run.progress import all_samples, monitor_files
    from hpcjobs.run.select import select_one
    from hpcjobs.run.steps import samples_dir

    alone = Path(job)
    if alone.is_dir() and monitor_files(alone):
        title, samples, facts = alone.absolute().name, alone, dict[str, str | None]()
    else:
        entry = select_one(job, site=site)
        title, samples, facts = entry.name, samples_dir(entry), load_page.facts_of(entry)
    nodes = all_samples(samples)
    if not nodes:
        raise RequestError(
            f"{samples} has no samples of its nodes",
            hint="hpcjobs submit --monitor, or hpcjobs monitor while the job runs, takes some",
        )
    folder = output or Path(f"{title}-load")
    count = sum(len(node.samples) for node in nodes)
    lead = f"{format_count(count, 'sample')} of {format_count(len(nodes), 'node')}, from {samples}"
    load_page.write(f"Load of {title}", lead, nodes, folder, facts=facts)
    record_output(folder)
    measured = load_page.measure(nodes)
    if as_json:
        print_output("report load", {"nodes": measured, "page": str(folder / "index.html")})
        return
    print_table(["NODE", "SAMPLES", "GPU", "CPU", "MEMORY"], [load_page.cells(node) for node in measured])
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
    from hpcjobs.sweeps import results_page
    from hpcjobs.sweeps.results_page import cell
    from hpcjobs.sweeps.sweep import find_sweep

    measured = find_sweep(name)
    table, called = measured.table(), measured.definition.name
    usual, largest = table.usual_metric
    metric, largest = least or most or usual, most is not None or (least is None and largest)
    ranked = table.rank(metric, largest=largest)
    best = ranked[0] if ranked else None
    folder = output or Path(f"{called}-report")
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
