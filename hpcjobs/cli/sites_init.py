"""``hpcjobs sites init``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcjobs.cli.output import Json, note, print_output
from hpcjobs.cli.terminal import write_document
from hpcjobs.units import format_count

if TYPE_CHECKING:
    from hpcjobs.discovery.proposal import ProposedSite


def init(
    name: Annotated[
        str | None, typer.Argument(help="Name of the site [Slurm's ClusterName].", show_default=False)
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", help="Write this file [NAME.yaml among your site files].", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the file and write nothing.")] = False,
    as_json: Json = False,
    partition: Annotated[str | None, typer.Option("-p", "--partition", help="Default partition.")] = None,
    account: Annotated[str | None, typer.Option("-A", "--account", help="Account of jobs that name none.")] = None,
    qos: Annotated[str | None, typer.Option("-q", "--qos", help="QOS of jobs that name none.")] = None,
    time: Annotated[str | None, typer.Option("-t", "--time", help="Time limit of jobs that name none [1h].")] = None,
    mpi: Annotated[str | None, typer.Option(help="MPI type for srun --mpi.")] = None,
    interface: Annotated[str | None, typer.Option(help="Fast network interface of the nodes.")] = None,
    module: Annotated[list[str] | None, typer.Option(help="Module that jobs load; repeatable.")] = None,
    module_init: Annotated[str | None, typer.Option(help="Script that defines module on the nodes.")] = None,
    conda: Annotated[str | None, typer.Option(help="Conda environment of jobs: name or path.")] = None,
    venv: Annotated[str | None, typer.Option(help="Virtual environment of jobs.")] = None,
    container_runtime: Annotated[
        str | None, typer.Option(help="Container runtime of the nodes: apptainer, singularity, pyxis or none.")
    ] = None,
    scratch: Annotated[str | None, typer.Option(help="Scratch folder of a node, expanded there.")] = None,
    run_root: Annotated[str | None, typer.Option(help="Folder of run folders; all nodes see it.")] = None,
    login: Annotated[str | None, typer.Option(help="Name of the login node from outside.")] = None,
) -> None:
    """Write a site file from the cluster of this login node, with the origin of each value and the open questions."""
    import os
    import time as clock

    from hpcjobs.discovery.draft import draft_site
    from hpcjobs.discovery.proposal import Answers
    from hpcjobs.discovery.read import read_cluster
    from hpcjobs.discovery.site_file import choose_path, default_name, save_text
    from hpcjobs.discovery.text import write_text
    from hpcjobs.scheduler.slurm.client import SlurmScheduler

    answers = Answers(
        partition=partition, account=account, qos=qos, time=time, mpi=mpi, interface=interface,
        modules=tuple(module or ()), module_init=module_init, conda=conda, venv=venv,
        container_runtime=container_runtime, scratch=scratch, run_root=run_root, login=login,
    )  # fmt: skip
    path = choose_path(name, file, force=force or dry_run) if name is not None or file is not None else None
    cluster = read_cluster(SlurmScheduler())
    if path is None:
        path = choose_path(default_name(cluster), None, force=force or dry_run)
    draft = draft_site(path.stem, cluster, answers)
    text = write_text(draft, made=f"hpcjobs sites init on {os.uname().nodename}, {clock.strftime('%F')}")
    if not dry_run:
        save_text(path, text, force=force)
    if as_json:
        _print_draft(draft, path, text, written=not dry_run)
        return
    if dry_run:
        write_document(text)
        return
    partitions = format_count(len(draft.partitions), "partition")
    questions = format_count(len(draft.questions), "open question")
    print(f"wrote {path}: {partitions}, {questions} at its end")
    print(f"next: hpcjobs submit --site {path if file is not None else draft.name} --dry-run hostname")
    if draft.omissions:
        note("left out: " + "; ".join(f"{o.partition} ({o.reason})" for o in draft.omissions))


def _print_draft(draft: ProposedSite, path: Path, text: str, *, written: bool) -> None:
    import yaml

    print_output(
        "sites init",
        {
            "name": draft.name,
            "path": str(path),
            "written": written,
            "site": yaml.safe_load(text),
            "origins": {entry.key: entry.origin for entry in draft.entries},
            "left_out": {omission.partition: omission.reason for omission in draft.omissions},
            "facts": draft.notes,
            "questions": [question._asdict() for question in draft.questions],
        },
    )
