"""Takes a trainer from its command line to an exit code; torch is loaded only once flags and world are right.

Python's garbage collector is off while a trainer loads, and skips the loaded objects afterwards: torch makes 300,000
objects and no garbage. One rank that trains one step needs 0.86 of the CPU time of a script by hand, and 1.15 with the
collector on (`benchmarks/trainer_start.py`).
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar

from hpcjobs.record.summary import RunSummary
from hpcjobs.runtime.dist import DistEnv, refuse_other_world
from hpcjobs.runtime.exits import AlreadyReported, ExitCode, Requeue, TrainerError, UsageError, flush, print_error
from hpcjobs.runtime.signals import Stop, control_dir, ignore, listen
from hpcjobs.trainers.config import (
    Config,
    Parser,
    add_flags,
    find_function,
    flags_of,
    list_options,
    parse_all,
    read_flags,
)


@contextmanager
def pause_collection() -> Iterator[None]:
    """Turn the collector off until `collect_new_objects`, and do not collect all objects as the process ends."""
    was_on = gc.isenabled()
    gc.disable()
    atexit.register(gc.freeze)
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def collect_new_objects() -> None:
    """Turn the collector on for new objects."""
    gc.freeze()
    gc.enable()


F = TypeVar("F")
SILENT_RANKS_WAIT_S = 1.5


@dataclass(frozen=True)
class NoFlags:
    """Flags of a bundled workload: it has only the common flags."""


@dataclass(frozen=True)
class Call(Generic[F]):
    """One rank's whole request: which trainer, its flags, and the rank's place in the world."""

    trainer: str
    config: Config
    flags: F
    env: DistEnv
    workload_flags: Any = field(default_factory=lambda: NoFlags())
    """The own flags of a user's workload: a dataclass."""
    stop: Stop | None = None
    """The request to stop, in a job that can be started again."""


def launch(
    trainer: str,
    about: str | None,
    flags: type[Any],
    argv: Sequence[str] | None,
    *,
    strategy: str,
    train: str = "hpcjobs.trainers.loop:train",
) -> int:
    """Run `strategy` ("module:Class", made with the values of `flags`) in the loop `train`; the exit code."""
    config = Config()
    stop = listen() if control_dir() is not None else None  # first: without a handler, a signal kills
    try:
        with pause_collection():
            asks_for_help = {"-h", "--help"} & set(sys.argv[1:] if argv is None else argv)
            env = DistEnv.from_environ({} if asks_for_help else os.environ)
            set_library_environment(env)
            config, chosen, own = _parse(trainer, about, flags, argv)
            refuse_other_world(env, os.environ)
            call = Call(trainer, config, chosen, env, own, stop)
            run = resolve_name(train)  # from here on torch is loaded
            run(call, resolve_name(strategy)(chosen))
    except Requeue as left:
        return left.code
    except TrainerError as error:
        record_failure(trainer, config, error)
        return report(error)
    finally:
        if stop is not None:  # a signal while the interpreter ends would make a failure of a completed run
            ignore()
        if "hpcjobs.trainers.distributed" in sys.modules:
            resolve_name("hpcjobs.trainers.distributed:release_groups")()
        flush()
    return ExitCode.OK


def own_rank() -> str:
    """Return the rank that decides who reports an error, also if the environment is wrong."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))


def record_failure(trainer: str, config: Config, error: TrainerError) -> None:
    """Write the summary of a failed run: its flags and the error; metrics.jsonl has its progress."""
    run_dir = os.environ.get("HPCJOBS_RUN_DIR", config.run_dir)
    if own_rank() != "0" or run_dir is None or not Path(run_dir).is_dir():
        return
    ranks = os.environ.get("HPCJOBS_NTASKS", os.environ.get("WORLD_SIZE", "1"))
    summary = RunSummary(
        trainer=trainer,
        strategy=trainer,
        workload=config.workload,
        status="failed",
        exit_code=int(error.code),
        error=str(error),
        world_size=int(ranks) if ranks.isdigit() else 1,
        job_id=os.environ.get("HPCJOBS_JOB_ID"),
        config=asdict(config),
    )
    try:
        summary.write(Path(run_dir))
    except OSError as full:  # the error itself is still to be reported
        print_error(f"warning: no summary in {run_dir}: {full}")


def report(error: TrainerError) -> int:
    """Report an error on one rank. Before ranks meet, all have the same error: rank 0 prints it, the others wait."""
    if isinstance(error, AlreadyReported):
        return error.code
    if error.elected or own_rank() == "0":
        print_error(f"error: {error}")
    else:
        time.sleep(SILENT_RANKS_WAIT_S)  # a launcher kills all ranks when the first one leaves
    return error.code


def _parse(trainer: str, about: str | None, flags: type[F], argv: Sequence[str] | None) -> tuple[Config, F, Any]:
    parser = Parser(prog=trainer, description=about, allow_abbrev=False)
    add_flags(parser, Config, title="every trainer")
    add_flags(parser, flags, title=trainer)
    own = _add_workload_flags(parser, argv)
    parsed = parse_all(parser, argv)
    return read_flags(Config, parsed), read_flags(flags, parsed), read_flags(own, parsed)


def _add_workload_flags(parser: Parser, argv: Sequence[str] | None) -> type[Any]:
    """Add the own flags of a user's workload, which is imported for that; their dataclass."""
    first = Parser(prog=parser.prog, add_help=False, allow_abbrev=False)
    first.add_argument("--workload", default="")
    name = first.parse_known_args(argv)[0].workload
    if ":" not in name:
        return NoFlags
    own = flags_of(find_function(name))
    makers: dict[str, str] = {}
    for item in fields(own):
        for option in list_options(item):
            if option in parser._option_string_actions:
                raise UsageError(
                    f"--workload {name}: its parameter {item.name} has the name of a flag of every trainer, {option}",
                    hint="another name; `config` has the values of those flags",
                )
            if option in makers:
                raise UsageError(
                    f"--workload {name}: its parameters {makers[option]} and {item.name} both make the flag {option}",
                    hint="a bool makes two flags, --NAME and --no-NAME",
                )
            makers[option] = item.name
    if fields(own):
        add_flags(parser, own, title=name)
    return own


def set_library_environment(env: DistEnv) -> None:
    """Set the variables that libraries read once, before torch is loaded."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hides retries of a connection
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores // env.local_world_size))
