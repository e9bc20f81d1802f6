"""``hpcjobs drill``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcjobs.cli.arguments import VerbGroup
from hpcjobs.cli.output import Json, SiteName, note, opt, print_output

if TYPE_CHECKING:
    from hpcjobs.drills.drill import DrillVerdict

app = typer.Typer(
    cls=VerbGroup,
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    help="Inject a fault into a run and show whether it recovers.",
)


FAULTS = {
    "timeout": "Let a run reach its time limit.",
    "preempt": "Preempt a run.",
    "kill-rank": "Kill the last rank of a run.",
    "kill-node": "Kill every rank of a run on its last node.",
    "full-disk": "Fill the disk of a run's rank 0 for a while.",
}
_HELP = """

Wait for the recovery, and compare the run with an undisturbed one. Both are ordinary jobs of yours; PROGRAM is a
trainer, with its flags. Exit code 0: the run recovered, and the losses of both are the same.
"""


def _add(fault: str) -> None:
    """``hpcjobs drill FAULT``: the same options for each."""

    @app.command(fault, help=FAULTS[fault] + _HELP, context_settings={"allow_interspersed_args": False})
    def command(
        program: Annotated[list[str] | None, typer.Argument(help="As for submit [a small ddp run].")] = None,
        site: SiteName = None,
        partition: Annotated[str | None, opt("--partition", "-p", help="Partition [the site's default].")] = None,
        nodes: Annotated[int | None, opt("--nodes", "-N", help="Nodes [2; without Slurm 1].")] = None,
        ntasks_per_node: Annotated[
            int | None, opt("--ntasks-per-node", help="Ranks per node [1; without Slurm 2].")
        ] = None,
        launcher: Annotated[
            str | None, opt("--launcher", help="Program that starts the ranks: srun, torchrun … [the site's first].")
        ] = None,
        time: Annotated[str | None, opt("--time", "-t", help="Time limit of both runs [timeout: 1m].")] = None,
        signal_before: Annotated[
            str | None,
            opt("--signal-before", help="Signal the program this long before its time limit [timeout: 20s]."),
        ] = None,
        option: Annotated[list[str] | None, opt("-o", help="Any other sbatch option: -o exclusive.")] = None,
        by: Annotated[
            str | None,
            opt(
                "--by",
                help="Only for preempt: partition of higher priority, whose job takes the nodes [none: SIGTERM].",
            ),
        ] = None,
        at_step: Annotated[int, typer.Option(help="The fault comes at this step.", min=1)] = 40,
        tolerance: Annotated[float, typer.Option(help="Largest relative difference of a loss.")] = 0.0,
        as_json: Json = False,
    ) -> None:
        from hpcjobs.cli.job_options import sbatch_options
        from hpcjobs.drills.drill import drill

        flags = {"partition": partition, "nodes": nodes, "ntasks_per_node": ntasks_per_node, "launcher": launcher,
                "time": time, "signal_before": signal_before}  # fmt: skip
        options = sbatch_options(option or [], flags)
        verdict = drill(
            fault, program or (), site=site, by=by, at_step=at_step, tolerance=tolerance, say=note, options=options
        )
        if as_json:
            print_output("drill", verdict)
        else:
            print("\n".join(_describe(verdict)))
        raise typer.Exit(0 if verdict.passed else 1)


for _fault in FAULTS:
    _add(_fault)


def _describe(verdict: DrillVerdict) -> list[str]:
    same = "identical" if verdict.difference == 0 else f"within {verdict.difference:.2g}"
    lines = [
        f"drill {verdict.fault} on site {verdict.site}: {'PASSED' if verdict.passed else 'FAILED'}",
        f"  fault: {verdict.about}",
        f"  attempts: {verdict.attempts}, {verdict.steps} steps, {verdict.lost} of them done twice",
    ]
    if verdict.resumed_at is not None:
        lines.append(f"  the last one took up step {verdict.resumed_at}")
    if verdict.resume_s is not None:
        lines.append(f"  from the fault to the next step: {verdict.resume_s:.0f} s")
    lines.append(f"  losses of {verdict.losses_compared} lines {same} with those of the run left alone")
    lines += [f"  FAILED: {problem}" for problem in verdict.problems]
    return [*lines, f"  run folder {verdict.run_dir}"]
