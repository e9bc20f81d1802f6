"""Every long option of sbatch from Slurm 22.05 to 25.05, and what becomes of it here.

An option is a field of `Resources`, an option of ``hpcjobs submit``, passed through unread, or refused with the reason.
The command line's options, the reader of ``#SBATCH`` lines and docs/sbatch_options.md all come from this table.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Argument(Enum):
    """Whether an option has a value."""

    TEXT = "VALUE"
    COUNT = "N"
    OPTIONAL = "[VALUE]"
    NONE = ""


class Treatment(Enum):
    """What hpcjobs does with an option."""

    FIELD = "own option"
    COMMAND = "own option of submit"
    PASSED = "passed through by --sbatch"
    REFUSED = "refused"


class Sbatch(NamedTuple):
    """One long option of sbatch."""

    name: str
    short: str | None
    argument: Argument
    treatment: Treatment
    reason: str = ""
    """Why it is refused, and what to use instead; or what is to be known of it."""
    versions: str = ""
    """Where it is not in all of Slurm 22.05 to 25.05."""

    @property
    def field(self) -> str:
        """Its name in spec files, site files and Python."""
        return self.name.replace("-", "_")


_T, _N, _O, _F = Argument.TEXT, Argument.COUNT, Argument.OPTIONAL, Argument.NONE


def _own(names: str, argument: Argument) -> list[Sbatch]:
    """Own options from ``name`` or ``name/letter``, separated by blanks."""
    pairs = [name.partition("/") for name in names.split()]
    return [Sbatch(name, letter or None, argument, Treatment.FIELD) for name, _, letter in pairs]


def _pass(names: str, argument: Argument, versions: str = "") -> list[Sbatch]:
    pairs = [name.partition("/") for name in names.split()]
    return [Sbatch(name, letter or None, argument, Treatment.PASSED, "", versions) for name, _, letter in pairs]


def _refuse(name: str, short: str | None, argument: Argument, reason: str, versions: str = "") -> Sbatch:
    return Sbatch(name, short, argument, Treatment.REFUSED, reason, versions)


_LATER = "after 22.05"
_LOG = "the output is in the run folder; `hpcjobs logs` prints it"
_OF_COMMAND = "an option of the command sbatch itself"
_OPTIONS = (
    *_own("account/A array/a begin/b constraint/C dependency/d distribution/m exclude/x licenses/L nodelist/w", _T),
    *_own("nodes/N partition/p qos/q time/t gpus/G acctg-freq bb bbf comment cpu-freq deadline gpu-freq", _T),
    *_own("gpus-per-node gpus-per-task gres hint mail-type mail-user mem mem-per-cpu mem-per-gpu network", _T),
    *_own("open-mode nodefile/F prefer profile reservation signal switches time-min tmp wckey", _T),
    *_own("ntasks/n cpus-per-task/c core-spec/S cores-per-socket cpus-per-gpu ntasks-per-core ntasks-per-gpu", _N),
    *_own("ntasks-per-node ntasks-per-socket priority sockets-per-node threads-per-core", _N),
    *_own("exclusive nice no-kill/k", _O),
    *_own("contiguous hold/H overcommit/O oversubscribe/s requeue spread-job", _F),
    Sbatch("power", None, _T, Treatment.FIELD, versions="not in newer ones"),
    Sbatch("job-name", "J", _T, Treatment.COMMAND, "also `--name`"),
    Sbatch("chdir", "D", _T, Treatment.COMMAND),
    Sbatch("no-requeue", None, _F, Treatment.COMMAND, "`requeue: false` in files"),
    Sbatch("test-only", None, _F, Treatment.COMMAND),
    Sbatch("parsable", None, _F, Treatment.COMMAND),
    Sbatch("wait", "W", _F, Treatment.COMMAND),
    Sbatch("wrap", None, _T, Treatment.COMMAND),
    *_pass("batch cluster-constraint delay-boot extra-node-info/B gid gpu-bind gpus-per-socket gres-flags", _T),
    *_pass("kill-on-invalid-dep mcs-label mem-bind mincpus thread-spec uid wait-all-nodes", _T),
    *_pass("get-user-env propagate", _O),
    *_pass("reboot use-min-nodes", _F),
    *_pass("extra segment tres-bind tres-per-task", _T, _LATER),
    *_pass("oom-kill-step resv-ports", _O, _LATER),
    *_pass("consolidate-segments stepmgr", _F, _LATER),
    _refuse("output", "o", _T, _LOG),
    _refuse("error", "e", _T, _LOG),
    _refuse(
        "input", "i", _T, "a job has no standard input; the program must open the file itself (< FILE in a script)"
    ),
    _refuse("clusters", "M", _T, "write a site file for that cluster, with its slurm_conf, and use --site"),
    _refuse("export", None, _T, "--env NAME=VALUE, or --env NAME; in a batch script it is passed through"),
    _refuse("export-file", None, _T, "--env NAME=VALUE, or --env NAME; in a batch script it is passed through"),
    _refuse(
        "container", None, _T, "sbatch would run the script itself in it; --container here names an image for tasks"
    ),
    _refuse("container-id", None, _T, "sbatch would run the script itself in it; see --container", _LATER),
    _refuse("ignore-pbs", None, _F, "write it into the script: #SBATCH --ignore-pbs"),
    _refuse("quiet", "Q", _F, _OF_COMMAND),
    _refuse("verbose", "v", _F, _OF_COMMAND),
    _refuse("usage", None, _F, _OF_COMMAND),
    _refuse("help", "h", _F, _OF_COMMAND),
    _refuse("version", "V", _F, _OF_COMMAND),
)
OPTIONS = {option.name: option for option in sorted(_OPTIONS, key=lambda option: option.name)}
ALIASES = {"tasks-per-node": "ntasks-per-node", "cluster": "clusters", "workdir": "chdir", "share": "oversubscribe"}
"""Other names that sbatch has, or had, for an option."""
RESOURCES = tuple(option for option in OPTIONS.values() if option.treatment is Treatment.FIELD)
"""Options that are fields of `Resources`."""
BY_LETTER = {option.short: option for option in _OPTIONS if option.short is not None}


def find_option(name: str) -> Sbatch | None:
    """The option of that long name, or the only one that begins with it: sbatch takes abbreviations too."""
    if (exact := ALIASES.get(name, name)) in OPTIONS:
        return OPTIONS[exact]
    beginning = {ALIASES.get(known, known) for known in (*OPTIONS, *ALIASES) if known.startswith(name)}
    return OPTIONS[beginning.pop()] if len(beginning) == 1 else None


def option_of(text: str) -> tuple[str, str | None]:
    """Option and value of ``NAME=VALUE`` or ``NAME``: the long option that the name, or its beginning, means."""
    name, equals, value = text.removeprefix("--").partition("=")
    option = find_option(name.strip())
    return (option.name if option is not None else name.strip()), value if equals else None
