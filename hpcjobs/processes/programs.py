"""Starts programs on the submit side, without the variables that an enclosing job left in the environment."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from io import TextIOWrapper
from subprocess import DEVNULL, PIPE, STDOUT, Popen
from threading import Timer, current_thread, main_thread
from typing import Protocol

from hpcjobs import slurm_commands
from hpcjobs.errors import CommandMissingError
from hpcjobs.processes import start as starting
from hpcjobs.processes.start import Result as Result
from hpcjobs.processes.start import Stream, own_module_words

LEAKING = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "PMI", "PMIX_", "OMPI_", "TORCHELASTIC_", "GROUP_")
LEAKING_NAMES = frozenset(
    (
        *("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
        *("HPCJOBS_SUBMISSION", "HPCJOBS_OUTPUTS"),  # of the command that a laptop sent, and of no job
    )
)
_SETTINGS = ("OMPI_MCA_", "PMIX_MCA_")
"""Prefixes of settings that users and modules make for Open MPI; inside a task mpirun itself sets `_OF_MPIRUN`."""
_OF_MPIRUN = (
    *("OMPI_MCA_orte_", "OMPI_MCA_ess", "OMPI_MCA_pmix", "OMPI_MCA_initial_wdir", "OMPI_MCA_mpi_oversubscribe"),
    *("OMPI_MCA_shmem_RUNTIME_QUERY_hint", "PMIX_MCA_mca_base_component_show_load_errors"),
)
NOT_LEAKING = frozenset(("SLURM_CONF", "SLURM_CLUSTERS"))
"""Variables of an enclosing job: prefixes (`LEAKING`), names (`LEAKING_NAMES`) and exceptions (`NOT_LEAKING`)."""

_SILENCE_S = 10.0
"""Time after which the user is told that a Slurm command has not answered."""
# Defaults of a user for commands typed by hand: SQUEUE_STATES or SCANCEL_STATE would hide jobs from us.
_USER_DEFAULTS = tuple(f"{command.upper()}_" for command in slurm_commands.NAMES)


def own_command(*arguments: str) -> list[str]:
    """This hpcjobs with ``arguments``, as a command that takes no module from the current folder."""
    return [sys.executable, "-u", *own_module_words("hpcjobs"), *arguments]


class Runner(Protocol):
    """Runs a program to its end. Tests put a recorded answer here, an SSH transport would fit too."""

    def __call__(
        self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> Result: ...


def clean_env(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without the variables of an enclosing job.

    A submission from inside a job or a salloc shell would otherwise pass its task layout, CPU binding and rank to the
    new job. SLURM_CONF and SLURM_CLUSTERS select the cluster, and stay, as do the settings of Open MPI. The settings of
    sbatch (SBATCH_ACCOUNT) are read into the job (`job/layers.py`).
    """
    source = os.environ if environ is None else environ
    of_launchers = _OF_MPIRUN if "OMPI_COMM_WORLD_RANK" in source else ()

    def leaks(name: str) -> bool:
        if name in NOT_LEAKING:
            return False
        if name.startswith(_SETTINGS):
            return name.startswith(of_launchers)
        return name in LEAKING_NAMES or name.startswith(LEAKING)

    return {name: value for name, value in source.items() if not leaks(name)}


def command_env(program: str) -> dict[str, str]:
    """The environment of a program that hpcjobs starts; for Slurm commands without the user's defaults."""
    env = clean_env()
    if os.path.basename(program) not in slurm_commands.NAMES:
        return env
    return {name: value for name, value in env.items() if not name.startswith(_USER_DEFAULTS)}


def start(
    argv: Sequence[str],
    *,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    stdin: Stream = DEVNULL,
    stdout: Stream = None,
    stderr: Stream = None,
    prepare: Callable[[], None] | None = None,
) -> Popen[bytes]:
    """Start ``argv`` and return at once; ``env`` is added to the clean environment, ``prepare`` is as of `starting`.

    Raises CommandMissingError: the program is not on PATH.
    """
    environment = command_env(argv[0]) | dict(env or {})
    try:
        return starting.start(
            argv, cwd=cwd, env=environment, stdin=stdin, stdout=stdout, stderr=stderr, prepare=prepare
        )
    except (FileNotFoundError, PermissionError) as error:
        raise _missing(argv[0], cwd, error) from error


def run(argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> Result:
    """Run ``argv`` to its end; ``env`` is added to the clean environment.

    Ctrl-C in the terminal does not reach a Slurm command, because it would end an sbatch before its answer. Only this
    process is interrupted, and either ends the command or waits for it.

    Raises CommandMissingError: the program is not on PATH.
    """
    own_session = os.path.basename(argv[0]) in slurm_commands.NAMES
    silence = Timer(_SILENCE_S, _report_silence, [argv[0]])
    silence.daemon = True
    try:
        if own_session and os.path.basename(argv[0]) != "srun":  # the step of an srun may run for long
            silence.start()
        return starting.run(argv, cwd=cwd, env=command_env(argv[0]) | dict(env or {}), new_session=own_session)
    except (FileNotFoundError, PermissionError) as error:
        raise _missing(argv[0], cwd, error) from error
    finally:
        silence.cancel()


def _report_silence(program: str) -> None:
    print(f"hpcjobs: {program} has not answered for {_SILENCE_S:.0f} s: wait, or press Ctrl-C", file=sys.stderr)


def run_following(
    argv: Sequence[str],
    each: Callable[[str], None],
    *,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
) -> int:
    """Run ``argv`` as `run` does, and pass each line of output to ``each`` at once; its exit code.

    Raises CommandMissingError: the program is not on PATH.
    """
    with start(argv, cwd=cwd, env=env, stdout=PIPE, stderr=STDOUT) as process:
        assert process.stdout is not None
        # Read as text: a progress bar ends its lines by a carriage return alone.
        with TextIOWrapper(process.stdout, encoding="utf-8", errors="replace") as output:
            for line in output:
                each(line.rstrip("\n"))
    return process.returncode


def run_in_terminal(
    argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None, stdin: Stream = None
) -> int:
    """As `run`, with this terminal for its output and, unless ``stdin`` says otherwise, its input; its exit code.

    Raises CommandMissingError: the program is not on PATH.
    """
    interrupts = 0

    def count(*_: object) -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts > 1:
            raise KeyboardInterrupt

    # Ctrl-C also interrupts the program, which then ends by itself; the next Ctrl-C kills it. This process may be
    # interrupted before it knows that the program has started, so it only counts the first interrupt.
    terminal = signal.getsignal(signal.SIGINT) is signal.default_int_handler and current_thread() is main_thread()
    if terminal:
        signal.signal(signal.SIGINT, count)
    try:
        process = start(argv, cwd=cwd, env=env, stdin=stdin)
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    finally:
        if terminal:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupts:
        raise KeyboardInterrupt
    return code


def _missing(program: str, cwd: str | None, error: OSError) -> Exception:
    """The error that names a missing program; ``error`` itself if only its working folder or permission is missing."""
    from hpcjobs.processes.fork import is_on_path  # loads ctypes, which a program that starts does without

    if (cwd is not None and not os.path.isdir(cwd)) or (isinstance(error, PermissionError) and is_on_path(program)):
        return error
    hint = None
    if program in slurm_commands.NAMES:
        hint = "is this a login node of the cluster? --site local needs no Slurm"
    elif program in ("ssh", "rsync"):
        hint = "without sbatch here, commands run on the login host of the site, by ssh and rsync; --remote no: here"
    return CommandMissingError(f"{program}: not found on PATH", hint=hint)
