"""The options of ``node.pyz attempts``, by which the job script configures further attempts of a job."""

import argparse
from typing import Dict, List, NamedTuple, Optional


class Options(NamedTuple):
    """Options of the job, and the command that runs one attempt."""

    run_dir: str
    scheduler: str
    """``slurm`` or ``local``."""
    budgets: Dict[str, int]
    """Cause -> how often it may end an attempt without ending the job."""
    warning_s: int
    """How long before the limit Slurm itself signals, and the program hears of it until it has measured better."""
    signal_before_s: Optional[int]
    """How long before the limit the user wants the signal; None: as the program measures."""
    tasks: int
    """Tasks of the job's one step; 0: several steps, whose ends say nothing about the job."""
    agents: bool
    """The tasks are elastic agents, which start ranks again."""
    may_shrink: bool
    """Nodes may fail while the rest continues."""
    nodes: str
    """Hosts of a job without a scheduler that names them; empty: it says, or this host."""
    held: bool
    """The user submitted the job held, and released it once."""
    notify: List[str]
    """The command that reports the end, before STATE and EXIT_CODE; empty: nobody wants to know."""
    command: List[str]
    argv: List[str]
    """The options as they were given."""


def parse(argv: List[str]) -> Options:
    """The options in ``argv``; the command follows ``--``."""
    parser = argparse.ArgumentParser(prog="node.pyz attempts")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--scheduler", choices=("slurm", "local"), required=True)
    parser.add_argument("--budgets", type=_budgets, required=True, help="timeout=N,preempt=N,node=N,error=N")
    parser.add_argument("--warning", type=int, required=True, metavar="S")
    parser.add_argument("--signal-before", type=int, metavar="S")
    parser.add_argument("--tasks", type=int, default=0)
    parser.add_argument("--agents", action="store_true")
    parser.add_argument("--may-shrink", action="store_true")
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--nodes", default="")
    parser.add_argument("--notify", action="append", default=[], metavar="WORD")
    parser.add_argument("command", nargs="*")
    arguments = parser.parse_args(argv)
    return Options(
        run_dir=arguments.run_dir,
        scheduler=arguments.scheduler,
        budgets=arguments.budgets,
        warning_s=arguments.warning,
        signal_before_s=arguments.signal_before,
        tasks=arguments.tasks,
        agents=arguments.agents,
        may_shrink=arguments.may_shrink,
        nodes=arguments.nodes,
        held=arguments.held,
        notify=arguments.notify,
        command=arguments.command,
        argv=argv,
    )


def _budgets(text: str) -> Dict[str, int]:
    return {name: int(count) for name, count in (pair.split("=") for pair in text.split(","))}
