"""Starts programs. No other module of hpcjobs does it: they call this one, or `fork` for a child that is prepared.

``argv`` is a list and never a shell string. Standard input is empty unless it is given.

Modules that are programs: with ``-m`` and ``-c`` Python searches the current folder first, and that folder may be
anybody's: a ``torch.py`` in it would run under the user's name.
"""

import os
import signal
import sys
from subprocess import DEVNULL, PIPE, Popen
from typing import IO, TYPE_CHECKING, Callable, Mapping, NamedTuple, NoReturn, Optional, Sequence, Tuple, Union

if TYPE_CHECKING:
    import asyncio


Stream = Union[int, IO[bytes], None]
"""None: inherited from this process."""


class Result(NamedTuple):
    """Exit code, standard output and standard error of a finished program."""

    code: int
    out: str
    err: str


def start(
    argv: Sequence[str],
    *,
    env: Optional[Mapping[str, str]] = None,
    cwd: Optional[str] = None,
    stdin: Stream = DEVNULL,
    stdout: Stream = None,
    stderr: Stream = None,
    new_session: bool = False,
    inherited: Sequence[int] = (),
    prepare: Optional[Callable[[], None]] = None,
) -> "Popen[bytes]":
    """Start ``argv`` and return at once.

    Args:
        env: its whole environment; None: this process's.
        inherited: file descriptors that stay open in it.
        prepare: called in the child before the program.

    Raises:
        OSError: it cannot be started.
    """
    return Popen(
        list(argv),
        env=None if env is None else dict(env),
        cwd=cwd,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=new_session,
        pass_fds=tuple(inherited),
        preexec_fn=prepare,
    )


def run(
    argv: Sequence[str],
    *,
    env: Optional[Mapping[str, str]] = None,
    cwd: Optional[str] = None,
    given: Optional[str] = None,
    show_errors: bool = False,
    timeout_s: Optional[float] = None,
    errors: str = "surrogateescape",
    new_session: bool = False,
) -> Result:
    """Run ``argv`` to its end, and return its exit code and output.

    Args:
        env: its whole environment; None: this process's.
        given: its standard input.
        show_errors: its standard error is this process's, and is not in the result.
        errors: how to decode bytes that are not UTF-8, as for ``bytes.decode``.

    Raises:
        OSError: it cannot be started. subprocess.TimeoutExpired: it was killed after ``timeout_s``.
    """
    pipe_errors = None if show_errors else PIPE
    process = start(argv, env=env, cwd=cwd, stdin=DEVNULL if given is None else PIPE, stdout=PIPE, stderr=pipe_errors,
                    new_session=new_session)  # fmt: skip
    with process:
        try:
            out, err = process.communicate(
                None if given is None else given.encode("utf-8", "surrogateescape"), timeout=timeout_s
            )
        except BaseException:
            process.kill()
            raise
    return Result(process.returncode, _decode(out, errors), _decode(err, errors))


def start_daemon(argv: Sequence[str], *, env: Mapping[str, str], log: str) -> int:
    """Start ``argv``, a full path first, in a new session with its output in ``log``; its process id.

    Not by `start`: the object that it returns complains when it is dropped while the program lives, and a daemon is to
    outlive this process. Signals that Python ignores are set back to their defaults.
    """
    return os.posix_spawn(
        argv[0],
        list(argv),
        dict(env),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP],
    )


async def start_async(argv: Sequence[str], *, env: Mapping[str, str]) -> "asyncio.subprocess.Process":
    """Start ``argv`` in a new session, with its input and output as streams of the running event loop."""
    import asyncio

    return await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE, env=dict(env), start_new_session=True)


def become(program: str, argv: "Sequence[Union[str, bytes]]") -> "NoReturn":
    """Replace this process by ``program``."""
    os.execv(program, list(argv))


def _decode(data: Optional[bytes], errors: str) -> str:
    return (data or b"").decode("utf-8", errors).replace("\r\n", "\n").replace("\r", "\n")


LEAVE_FOLDER = "import sys; sys.path = [*filter(None, sys.path)]"
"""First line of code for ``-c``: imports after it take no file of the current folder."""
_RUN = LEAVE_FOLDER + '; import runpy; runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)'


def module_words(name: str) -> Tuple[str, ...]:
    """Arguments with which a Python of any version runs module ``name`` as ``-m`` does."""
    return ("-c", _RUN, name)


def own_module_words(name: str) -> Tuple[str, ...]:
    """Arguments for the Python that runs this: ``-P`` from 3.11 on, which also holds for processes that it spawns."""
    return ("-P", "-m", name) if sys.version_info >= (3, 11) else module_words(name)
