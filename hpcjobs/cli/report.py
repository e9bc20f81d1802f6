"""``hpcjobs report``: jobs, scaling, sweep, advise."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcjobs.cli.jobs_table import print_jobs, print_totals
from hpcjobs.cli.output import Json, SiteName, note, print_json, print_table

if TYPE_CHECKING:
    import polars as pl

    from hpcjobs.accounting.sources import Gathered, Wanted
    from hpcjobs.scaling.comparison import Verdict

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def report() -> None:
    """What came out: jobs as the accounting has them, scaling studies, what to ask for next time."""


def _require(*modules: str) -> None:
    from importlib.util import find_spec

    from hpcjobs.errors import HpcJobsError

    if missing := [name for name in modules if find_spec(name) is None]:
        raise HpcJobsError(f"this report needs {' and '.join(missing)}", hint="pip install 'hpcjobs[report]'")


def _opt(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, show_default=False)


@app.command()
def jobs(
    ids: Annotated[
        list[str] | None,
        typer.Argument(help="Job ids, of any user; without ids the options select jobs.", show_default=False),
    ] = None,
    site: SiteName = None,
    since: Annotated[str, typer.Option(help="Jobs that ended within this time (7d, 12h), or have not ended.")] = "7d",
    user: Annotated[list[str] | None, _opt("--user", "-u", help="Jobs of this user; may be repeated [me].")] = None,
    all_users: Annotated[bool, typer.Option("--all-users", "-a", help="Jobs of all users that sacct shows.")] = False,
    account: Annotated[str | None, _opt("--account", "-A", help="Jobs of this account.")] = None,
    state: Annotated[
        list[str] | None, _opt("--state", help="Jobs in this state: COMPLETED, FAILED, ...; may be repeated.")
    ] = None,
    name: Annotated[str | None, _opt("--name", "-J", help="Jobs with names of this pattern: 'train-*'.")] = None,
    by: Annotated[str | None, _opt("--by", help="Sums by user, account, partition, qos, state, name or day.")] = None,
    as_json: Json = False,
    csv: Annotated[Path | None, _opt("--csv", help="Write all columns to this CSV file ('-': print).")] = None,
    parquet: Annotated[Path | None, _opt("--parquet", help="Write all columns to this Parquet file.")] = None,
) -> None:
    """Jobs as the accounting has them: waits, efficiencies, energy, cost, and what to ask for next time."""
    _require("polars")
    from hpcjobs.accounting.doubts import Doubts
    from hpcjobs.accounting.group_totals import moment
    from hpcjobs.accounting.sources import Wanted, gather, me
    from hpcjobs.errors import RequestError, UnknownJobError, nearest
    from hpcjobs.scheduler.base import State
    from hpcjobs.site.library import default_site

    try:
        start = moment(since)
    except ValueError as error:
        raise RequestError(f"--since {since}: say how long ago: 7d, 12h, 30m") from error
    for word in state or ():
        if word.upper() not in State.__members__:
            raise RequestError(f"--state {word} is no state of a job", hint=nearest(word.upper(), State.__members__))
    for path in (csv, parquet):
        if path is not None and not path.absolute().parent.is_dir():
            raise RequestError(f"{path} cannot be written: there is no folder {path.absolute().parent}")
    wanted = Wanted(
        since=start,
        users=tuple(user) if user else None if all_users or ids else (me(),),
        account=account,
        states=tuple(state) if state else None,
        name=name,
        job_ids=tuple(ids) if ids else None,
    )
    if by is not None:
        _print_sums(wanted, site, by=by, as_json=as_json, doubts=Doubts())
        return
    found = gather(wanted, site=site)
    _say(found)
    if ids and found.jobs.is_empty() and not (user or account or state or name):
        raise UnknownJobError(
            f"the accounting of site {site or default_site()} has no job {' '.join(ids)}",
            hint="it knows a new job some seconds after its start; --site names another site",
        )
    if csv is not None or parquet is not None:
        _write(found.jobs, csv=csv, parquet=parquet)
    elif as_json:
        print_json(found.jobs.to_dicts())
    else:
        print_jobs(found.jobs)


def _say(found: Gathered) -> None:
    for line in found.notes:
        note(line)
    for doubt in found.doubts:
        note(f"{doubt.rows} doubtful: {doubt.kind}: {'; '.join(doubt.examples[:3])}{' ...' * (doubt.rows > 3)}")


def _write(frame: pl.DataFrame, *, csv: Path | None, parquet: Path | None) -> None:
    if csv is not None:
        sys.stdout.write(frame.write_csv()) if str(csv) == "-" else csv.write_text(frame.write_csv(), encoding="utf-8")
    if parquet is not None:
        with parquet.open("wb") as file:  # opened here: an error then names the file
            frame.write_parquet(file)


def _print_sums(wanted: Wanted, site: str | None, *, by: str, as_json: bool, doubts: Any) -> None:
    from hpcjobs.accounting.group_totals import sums

    found = sums(wanted, by=by, site=site)
    _say(found)
    if as_json:
        print_json(found.jobs.to_dicts())
    else:
        print_totals(found.jobs, by)


@app.command()
def scaling(
    study: Annotated[str, typer.Argument(help="Name or file of the study.")],
    output: Annotated[Path | None, _opt("--output", "-O", help="Folder of the page [NAME-report].")] = None,
    target: Annotated[float, typer.Option(help="Efficiency of the knee, between 0 and 1.")] = 0.8,
    baseline: Annotated[str | None, _opt("--baseline", help="Another study to compare with.")] = None,
    check: Annotated[Path | None, _opt("--check", help="YAML file of bounds; exit code 1 when one is missed.")] = None,
    allow_mixed: Annotated[
        bool, typer.Option("--allow-mixed", help="Accept runs of different code, images or node models.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Did more nodes pay off? Table, fits, plots; a page to pass on (HTML, Markdown, CSV, Parquet, PNG, SVG)."""
    _require("polars", "matplotlib", "scipy")
    from hpcjobs.scaling import comparison, page, tables
    from hpcjobs.scaling.analysis import analyse
    from hpcjobs.scaling.runs import read_runs
    from hpcjobs.scaling.study import path_of, read

    asked = read(path_of(study))
    runs = read_runs(asked)
    found = analyse(runs, mode=asked.mode, target=target, allow_mixed=allow_mixed)
    rows = None
    if baseline is not None:
        other = read(path_of(baseline))
        before = analyse(read_runs(other), mode=other.mode, target=target, allow_mixed=allow_mixed)
        rows = comparison.compare(found, before)
    folder = output or Path(f"{asked.name}-report")
    page.write(asked, found, runs, folder, baseline=baseline, comparison=rows)
    if as_json:
        fits = [
            {
                "law": fit.law.name,
                "rms": fit.rms,
                "chosen": fit is found.chosen,
                "parameters": tables.parameters(found, fit),
            }
            for fit in found.fits
        ]
        print_json({"groups": [group._asdict() for group in found.groups], "summary": found.summary, "fits": fits,
                    "knee": found.knee._asdict(), "page": str(folder / "index.html")})  # fmt: skip
    else:
        for line in tables.warnings(found):
            note(line)
        print_table(*tables.sizes(found))
        print_table(["LAW", "PARAMETER", "VALUE", "95 %", "RESIDUALS"], tables.fit_rows(found))
        for line in found.summary:
            print(line)
        if rows:
            print_table(rows[0], rows[1:])
        print(f"page {folder / 'index.html'}")
    if check is not None:
        _print_verdicts(comparison.check(found, check))


def _print_verdicts(verdicts: list[Verdict]) -> None:
    for verdict in verdicts:
        word = "held" if verdict.held else "MISSED"
        print(f"{word}: {verdict.what} at {verdict.n}: {verdict.measured:.4g}, at least {verdict.least:.4g}")
    if not all(verdict.held for verdict in verdicts):
        raise typer.Exit(1)


@app.command()
def sweep(
    name: Annotated[str, typer.Argument(help="Name or folder of the sweep.")],
    least: Annotated[str | None, _opt("--min", help="Metric to compare by; the smallest is best [loss].")] = None,
    most: Annotated[str | None, _opt("--max", help="Metric to compare by; the largest is best.")] = None,
    output: Annotated[Path | None, _opt("--output", "-O", help="Folder of the page [NAME-report].")] = None,
    as_json: Json = False,
) -> None:
    """Which parameters did best? A page with pictures to pass on (HTML, CSV, Parquet, PNG, SVG)."""
    _require("polars", "matplotlib")
    from hpcjobs.sweeps import results_page
    from hpcjobs.sweeps.results_page import cell
    from hpcjobs.sweeps.sweep import find_sweep

    found = find_sweep(name)
    table, called = found.table(), found.definition.name
    metric = least or most or next((m for m in ("evaluation.loss", "loss") if m in table.measured), "loss")
    ranked = table.ranked(metric, largest=most is not None)
    best = ranked[0] if ranked else None
    folder = output or Path(f"{called}-report")
    results_page.write(
        called, table.rows, table.params, folder, compared=ranked, metric=metric, largest=most is not None
    )
    if as_json:
        print_json({"best": best, "page": str(folder / "index.html")})
        return
    if best is not None:
        columns = [*table.params, metric, "job_id"]
        print_table([*table.params, metric, "JOB"], [[cell(best.get(name)) for name in columns]])
    print(f"page {folder / 'index.html'}")


@app.command()
def advise(
    words: Annotated[list[str], typer.Argument(help="Job ids, run folders, names, or a study.")],
    site: SiteName = None,
    as_json: Json = False,
) -> None:
    """What to ask for next time: memory, time, CPUs, nodes, from what was used; and when it would start then."""
    _require("polars", "scipy")
    from hpcjobs.scaling.right_size import right_size

    told = right_size(words, site=site)
    if as_json:
        print_json(
            [
                {
                    "job_id": job,
                    "advice": [one._asdict() for one in found.advice],
                    "starts": found.starts._asdict() if found.starts else None,
                }
                for job, found in told.items()
            ]
        )
        return
    for job, found in told.items():
        for line in map(str, found.advice) if found.advice else ["nothing to change"]:
            print(f"{job}: {line}")
        if found.starts is not None:
            print(f"{job}: {found.starts}")
