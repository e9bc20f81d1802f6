"""Options of sbatch as options of every verb that submits jobs: each is declared here once.

A field of `Resources` is an option by its own long name. What is often typed has a line in help; the rest is named in
help's last paragraph, and explained by ``man sbatch``.
"""

import inspect
import textwrap
from collections.abc import Callable, Iterable
from typing import Annotated, Any, NamedTuple

import typer

COUNT, TEXT, SWITCH = int, str, bool


class SbatchOption(NamedTuple):
    """One option of sbatch: the field of `Resources` that it sets, its short form, and help for people."""

    field: str
    short: str | None = None
    help: str = ""
    kind: type = TEXT

    @property
    def flag(self) -> str:
        return "--" + self.field.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        return (self.flag,) if self.short is None else (self.flag, self.short)

    @property
    def annotation(self) -> Any:
        # A switch without its opposite: `--no-...` is not sbatch's.
        option = typer.Option(*self.flags, help=self.help, show_default=False, hidden=not self.help)
        return Annotated[self.kind | None, option]


OFTEN_TYPED = (
    SbatchOption("partition", "-p", "Partition, or several: a,b."),
    SbatchOption("nodes", "-N", "Nodes: 4, or 2-4."),
    SbatchOption("ntasks", "-n", "Tasks (ranks) in all, shared evenly by the nodes.", COUNT),
    SbatchOption("ntasks_per_node", None, "Tasks (ranks) per node.", COUNT),
    SbatchOption("cpus_per_task", "-c", "CPUs per task.", COUNT),
    SbatchOption("gpus", "-G", "GPUs in all, shared evenly by the nodes: 8, or v100:8."),
    SbatchOption("gpus_per_node", None, "GPUs per node: 4, or v100:4."),
    SbatchOption("mem", None, "Memory per node, with a unit: 64G."),
    SbatchOption("time", "-t", "Time limit: 2h, 90m, 1-12:00:00, UNLIMITED."),
    SbatchOption("account", "-A", "Account."),
    SbatchOption("qos", "-q", "QOS."),
    SbatchOption("constraint", "-C", "Features that the nodes must have: ib&a100."),
    SbatchOption("nodelist", "-w", "Nodes that the job must have: n[01-04]."),
    SbatchOption("exclude", "-x", "Nodes that the job must not have."),
    SbatchOption("exclusive", None, "Share the nodes with no other job.", SWITCH),
    SbatchOption("array", "-a", "Job array: 0-9%2."),
    SbatchOption("dependency", "-d", "What must come first: afterok:4711 (see --after)."),
    SbatchOption("mail_type", None, "When to send mail: END,FAIL."),
    SbatchOption("mail_user", None, "Who gets the mail."),
)
BY_NAME = (
    *(SbatchOption(f) for f in ("mem_per_cpu", "mem_per_gpu", "time_min", "deadline", "reservation", "gres", "tmp")),
    *(SbatchOption(f) for f in ("comment", "wckey", "open_mode", "signal", "switches", "hint", "profile")),
    *(SbatchOption(f) for f in ("cpu_freq", "gpu_freq", "network", "power", "prefer", "acctg_freq", "bb", "bbf")),
    SbatchOption("begin", "-b"),
    SbatchOption("licenses", "-L"),
    SbatchOption("distribution", "-m"),
    SbatchOption("core_spec", "-S", kind=COUNT),
    SbatchOption("gpus_per_task"),
    *(SbatchOption(f, kind=COUNT) for f in ("cpus_per_gpu", "ntasks_per_gpu")),
    *(SbatchOption(f, kind=COUNT) for f in ("nice", "priority", "sockets_per_node", "cores_per_socket")),
    *(SbatchOption(f, kind=COUNT) for f in ("threads_per_core", "ntasks_per_socket", "ntasks_per_core")),
    SbatchOption("hold", "-H", kind=SWITCH),
    SbatchOption("overcommit", "-O", kind=SWITCH),
    SbatchOption("no_kill", "-k", kind=SWITCH),
    *(SbatchOption(f, kind=SWITCH) for f in ("requeue", "contiguous", "oversubscribe", "spread_job")),
)
"""Options without a line of their own in help."""
SBATCH_OPTIONS = (*OFTEN_TYPED, *BY_NAME)
_NAMES = ", ".join(sorted(option.flag for option in BY_NAME))
# Behind \b help keeps the lines as they are: it would break them within names, at a hyphen.
EPILOG = "\b\n" + textwrap.fill(f"Also, as sbatch has them: {_NAMES}.", 76, break_on_hyphens=False)


def with_sbatch_options(*, without: Iterable[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of sbatch: its parameter ``resources`` gets those that were typed, by field.

    A field that the command has a parameter of its own for is that command's own, and so are those of ``without``.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        left_out = {*without, *own.parameters}
        chosen = [option for option in SBATCH_OPTIONS if option.field not in left_out]

        def run(**values: Any) -> None:
            typed = {option.field: values.pop(option.field) for option in chosen}
            command(**values, resources={field: value for field, value in typed.items() if value is not None})

        parameters: list[inspect.Parameter] = []
        for name, parameter in own.parameters.items():
            if name != "resources":
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
                continue
            for option in chosen:
                kind = inspect.Parameter.KEYWORD_ONLY
                parameters.append(inspect.Parameter(option.field, kind, default=None, annotation=option.annotation))
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # Typer reads it
        return run

    return decorate
