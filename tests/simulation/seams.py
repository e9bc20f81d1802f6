"""Puts the package into a world: its clock, its programs, its files, its signals and its host are the world's.

This is the one place that knows where the package reaches outside. What has a seam is given the world's; the rest is
replaced by name.
"""

from __future__ import annotations

import functools
import io
import itertools
import math
import os
import pwd
import shutil
import signal
import socket
import sys
import time
import types
import warnings
from collections.abc import Callable, ItemsView, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from checkers import check_request
from jinja2.sandbox import ImmutableSandboxedEnvironment
from slurm import Slurm
from world import Killed, Process, World, file_error

from hpcjobs.node import step, supervisor
from hpcjobs.processes import programs, start
from hpcjobs.processes.start import Result
from hpcjobs.run import folder, job_files, rerun, submission, submit
from hpcjobs.scheduler.slurm.client import SlurmScheduler
from hpcjobs.site import machine, search
from hpcjobs.site.machine import cluster_name
from hpcjobs.sweeps import folder as sweep_folder
from hpcjobs.sweeps import submit as sweeps_submit

_CHANGES = frozenset(("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate"))
_FOR_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_active: Files | None = None
_real_time, _real_monotonic, _real_getpid, _real_uname = time.time, time.monotonic, os.getpid, os.uname
TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n"


class Files:
    """Faults of files below one folder."""

    def __init__(self, world: World, root: str) -> None:
        self.world, self.root = world, root + "/"
        self._unsynced: dict[str, tuple[str, float, int]] = {}
        """Path -> the host that wrote, when, and how large the file was before."""

    def note_write(self, path: str, flags: int) -> None:
        process = self.world.current
        if process is not None:
            before = os.stat(path).st_size if not flags & os.O_TRUNC and os.path.exists(path) else 0
            self._unsynced[path] = (process.host, self.world.now, before)

    def note_rename(self, source: str, target: str) -> None:
        self._unsynced.pop(target, None)
        if (written := self._unsynced.pop(source, None)) is not None:
            self._unsynced[target] = (*written[:2], 0)

    def note_sync(self, descriptor: int) -> None:
        self._unsynced.pop(os.readlink(f"/proc/self/fd/{descriptor}"), None)

    def cut_power(self, host: str) -> None:
        """The processes of a host end, and what they wrote within half a minute and never synced is gone."""
        world = self.world
        world.log(f"{host} loses power")
        for process in world.processes:
            if process.host == host:
                world.disturbed.add(process.pid)
                world.kill(process)
        for path, (writer, when, before) in self._unsynced.items():
            if writer == host and world.now - when < 30.0 and os.path.isfile(path) and before < os.stat(path).st_size:
                world.log(f"unsynced: {path.removeprefix(self.root)}")
                os.truncate(path, before)

    def before(self, path: object, *, creates: bool) -> None:
        """Called before each change below the folder."""
        world = self.world
        if world.current is None:
            return
        detail = world.point("file")
        process = world.current
        if process.has_submitted:
            detail = world.point("record") or detail
        if detail is None and world.now < world.full_until and creates:
            detail = "ENOSPC"
        if detail is not None and detail not in ("kill", "INT", "TERM", "HUP"):
            world.log(f"{process.name}: {detail} on {str(path).removeprefix(self.root)}")
            raise file_error(detail, path)
        if detail is not None:
            _deliver(world, detail)
        if world.random.random() < 0.03:
            world.sleep(0.01)


def _deliver(world: World, detail: str) -> None:
    """Kill the current process, or give it a signal."""
    process = world.current
    assert process is not None
    if detail == "kill":
        world.kill(process)
    number = getattr(signal, f"SIG{detail}")
    handler = process.handlers.get(number)
    world.log(f"{process.name}: SIG{detail}, {'deferred' if callable(handler) else 'not handled'}")
    if callable(handler):
        handler(number, None)
    elif process.waits_for_signals or process.name.startswith("job"):
        process.signals.append(number)
    elif number == signal.SIGINT:
        raise KeyboardInterrupt
    else:
        world.kill(process)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in _CHANGES or (files := _active) is None:
        return
    path = arguments[0]
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _FOR_WRITING):
        return
    if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(files.root):
        files.before(path, creates=event in ("open", "os.mkdir"))
        if event == "open":
            files.note_write(os.fspath(path), arguments[2])
        elif event == "os.rename":
            files.note_rename(os.fspath(path), os.fspath(arguments[1]))


_is_hooked = False


class _Environ(MutableMapping[str, str]):
    """The environment of the process whose turn it is."""

    def __init__(self, world: World, base: Mapping[str, str]) -> None:
        self._world, self._base = world, dict(base)

    def _all(self) -> dict[str, str]:
        process = self._world.current
        return self._base if process is None else {**self._base, **process.environ}

    def __getitem__(self, name: str) -> str:
        process = self._world.current
        return process.environ[name] if process is not None and name in process.environ else self._base[name]

    def __setitem__(self, name: str, value: str) -> None:
        self._base[name] = value

    def __delitem__(self, name: str) -> None:
        del self._base[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def copy(self) -> dict[str, str]:
        return dict(self._all())

    def items(self) -> ItemsView[str, str]:
        return self._all().items()


class Programs:
    """Runs commands: Slurm's at the simulated cluster, with faults of their answers."""

    def __init__(self, world: World, slurm: Slurm) -> None:
        self.world, self.slurm = world, slurm
        self.calls: list[tuple[str, list[str]]] = []

    def __call__(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float | None = None, **_: Any
    ) -> Result:
        world, arguments = self.world, list(argv)
        process = world.current
        if process is None:  # a checker asks
            return self.slurm.run(arguments, dict(env or {}))
        self.calls.append((process.name, arguments))
        check_request(world, self.slurm, arguments)
        command = arguments[0]
        if command == "git":
            return Result(128, "", "fatal: not a git repository\n")
        detail = world.point(_kind(process.name, arguments))
        if detail in ("kill", "INT", "TERM", "HUP"):
            _deliver(world, detail)
        self._delay()
        if detail == "lost_before":
            world.sleep(10.0)
            return Result(1, "", TIMED_OUT)
        if detail is not None and detail.startswith("late"):
            # The controller takes the request up after it has answered later ones.
            world.after(float(detail[4:]), lambda: self.slurm.run(arguments, dict(env or {})) and None)
            world.sleep(10.0)
            return Result(1, "", TIMED_OUT)
        if detail is not None and detail.startswith("slow"):
            world.sleep(float(detail[4:]))
        result = self.slurm.run(arguments, dict(env or {}))
        process.has_submitted = process.has_submitted or (command == "sbatch" and result.code == 0)
        self._delay()
        if detail == "forgotten":  # it is killed before it has saved what it accepted
            world.after(1.0 + 5.0 * world.random.random(), self.slurm.kill_unsaved)
        if detail == "lost_down":  # the controller dies once it has taken the request
            self.slurm.restart(away_s=400.0, keeps_state=True)
            world.sleep(10.0)
            return Result(1, "", TIMED_OUT)
        if detail == "lost_after":
            world.sleep(10.0)
            return Result(1, "", TIMED_OUT)
        if detail in ("empty", "garbage", "cut") and command != "sbatch":
            world.misled.append(process.name)
        if detail == "killed_after":  # the program, by the machine's memory say
            return Result(-9, "", "")
        if detail == "empty":
            return Result(0, "", "")
        if detail == "garbage":
            return Result(0, "Welcome to the cluster\n", "")
        if detail == "cut":
            return Result(result.code, result.out[: len(result.out) // 2], result.err)
        if detail == "kill_after":
            world.kill(process)
        return result

    def _delay(self) -> None:
        # A cluster that forgets a job within seconds answers at once: else no command could see the end of a job.
        self.world.delay(0.1 if self.slurm.settings.min_job_age_s < 60 else math.inf)


def _kind(name: str, argv: list[str]) -> str:
    """The kind of a point at which a command is run: those that change something are few among the others."""
    if argv[0] == "sbatch" and "--test-only" not in argv:
        return "resubmit" if name.startswith("job") else "sbatch"
    return "requeue" if argv[0] == "scontrol" and "requeue" in argv and name.startswith("job") else "program"


class _Signals:
    """`hpcjobs.processes.fork.SignalPipe` of a process of the world."""

    def __init__(self, world: World) -> None:
        self._world = world

    def wait(self, timeout_s: float | None, *_: int) -> list[int]:
        return self._world.wait_signals(timeout_s)

    def close(self) -> None:
        pass


class _SignalModule(types.SimpleNamespace):
    """The module `signal`, with handlers for each process of the world."""

    def __init__(self, world: World) -> None:
        super().__init__(SIGINT=signal.SIGINT, SIGTERM=signal.SIGTERM, SIGHUP=signal.SIGHUP, SIG_IGN=signal.SIG_IGN)
        self._world = world

    def getsignal(self, number: int) -> Any:
        process = self._world.current
        return signal.SIG_DFL if process is None else process.handlers.get(number, signal.SIG_DFL)

    def signal(self, number: int, handler: Any) -> Any:
        before = self.getsignal(number)
        if self._world.current is not None:
            self._world.current.handlers[number] = handler
        return before

    def raise_signal(self, number: int) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        process = self._world.current
        if process is not None:
            process.alive = False
            raise Killed


class _NoTree:
    """`hpcjobs.processes.tree` for the supervisor: scripts have no processes of the machine that could be signalled."""

    @staticmethod
    def children(_: int) -> list[int]:
        return []

    @staticmethod
    def reap() -> bool:
        return False

    @staticmethod
    def send(_pids: object, _number: int) -> None:
        pass


# The same in every life.
_read_user = functools.cache(pwd.getpwuid)
_compiled: dict[Any, Any] = {}
_real_compile, _real_site_files = ImmutableSandboxedEnvironment.compile, search._site_files


@functools.cache
def _site_files() -> list[Any]:
    return list(_real_site_files())


def _compile(environment: ImmutableSandboxedEnvironment, *given: Any) -> Any:
    """The code of a template: the source, its name and its file are given."""
    if given not in _compiled:
        _compiled[given] = _real_compile(environment, *given)
    return _compiled[given]


_packed: dict[str, bytes] = {}
_real_pack, _real_shell_files = folder.pack, folder.shell_files


def _pack(package: str) -> bytes:
    """Packed once, and small: nothing of it is run."""
    return _packed.setdefault(package, b"PK of " + package.encode())


@contextmanager
def inside(
    world: World, slurm: Slurm, home: Path, *, start_script: Callable[..., Any] | None = None
) -> Iterator[Files]:
    """Within the block the package lives in ``world``, with ``home`` as the home of everybody."""
    global _active, _is_hooked
    if not _is_hooked:
        sys.addaudithook(_hook)
        _is_hooked = True
    root = str(home.parent)
    files, run = Files(world, root), Programs(world, slurm)
    inherited = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TERM")}
    environ = _Environ(
        world, {**inherited, "HOME": str(home), "HPCJOBS_SANDBOX_ROOT": f"{root}/no-sandbox", "COLUMNS": "250"}
    )

    def wall() -> float:
        process = world.current
        if process is None:
            return world.now
        return world.now + (world.skew if process.host != "n0" else 0.0) + world.skews.get(process.host, 0.0)

    def pid() -> int:
        return _real_getpid() if world.current is None else world.current.pid

    def host() -> str:
        return "checker" if world.current is None else world.current.host

    def uname() -> Any:
        real = _real_uname()
        return os.uname_result((real[0], host(), *tuple(real)[2:]))

    def ticks(number: int) -> int | None:
        known = host()
        return next(
            (int(p.started * 100) for p in world.processes if p.pid == number and p.alive and p.host == known), None
        )

    locks = _Locks(world)
    replace, write = os.replace, os.write

    def replace_in_time(source: Any, target: Any, **options: Any) -> None:
        if world.current is not None:
            os.utime(source, (world.now, world.now))
        replace(source, target, **options)

    def write_or_fail(descriptor: int, data: Any) -> int:
        if world.current is not None and (detail := world.point("append") or world.point("write")) is not None:
            if detail == "torn":
                write(descriptor, bytes(data)[: len(data) // 2])
                world.kill(world.current)
            if detail == "short":
                return write(descriptor, bytes(data)[: max(1, len(data) // 2)])
            raise file_error(detail, f"descriptor {descriptor}")
        return write(descriptor, data)

    def fdopen(descriptor: int, mode: str = "r", *args: Any, **options: Any) -> Any:
        file = open(descriptor, mode, *args, **options)  # noqa: SIM115 - the caller closes it
        if world.current is not None and "w" in mode and "b" in mode:
            return _Failing(file, world, files.root)
        return file

    defaults, reruns = SlurmScheduler.__init__.__kwdefaults__, itertools.count()
    from hpcjobs.node.schedulers import Slurm as NodeSlurm
    from hpcjobs.run import wait as waiting

    node_defaults = NodeSlurm.__init__.__kwdefaults__
    watch_defaults, wait_defaults = waiting.Watch.__init__.__kwdefaults__, waiting.wait.__kwdefaults__
    patches = [
        patch.object(time, "time", wall), patch.object(time, "monotonic", lambda: world.now),
        patch.object(time, "sleep", world.sleep),
        patch.object(os, "getpid", pid), patch.object(os, "uname", uname), patch.object(os, "environ", environ),
        patch.object(os, "urandom", lambda count: world.random.randbytes(count)),
        patch.object(os, "getppid", lambda: 1), patch.object(os, "fsync", files.note_sync),
        patch.object(os, "replace", replace_in_time), patch.object(os, "write", write_or_fail),
        patch.object(os, "fdopen", fdopen), patch.object(os, "close", locks.close),
        patch.object(sweep_folder, "lock_file", locks.lock), patch.object(submission, "lock_file", locks.lock),
        patch.object(job_files, "lock_file", locks.lock),
        patch.object(sweeps_submit, "code_state", lambda path: None),
        patch.object(socket, "gethostname", host),
        patch.object(start, "run", run), patch.object(programs, "Timer", _NoTimer),
        patch.object(submit, "signal", _SignalModule(world)),
        patch.object(submission, "start_ticks", ticks), patch.object(folder, "pack", _pack),
        patch.object(folder, "shell_files", lambda script: {"job.bash": "# as shipped\n"}),
        patch.object(submission, "_numbers", _Numbers(world)),
        # Its answer is kept for the process: the first schedule alone would ask.
        patch.object(machine, "_has_configuration", lambda conf: True),
        patch.object(submit, "code_state", lambda path: None), patch.object(rerun, "code_state", lambda path: None),
        patch.object(rerun, "run_dir_of", lambda job: Path(job.run_root, f"{job.name}-rerun{next(reruns)}")),
        patch.dict(defaults, pause=world.sleep, clock=lambda: world.now),
        patch.dict(node_defaults, monotonic=lambda: world.now, wall=wall, sleep=world.sleep),
        patch.object(waiting, "POLL_S", world.random.choice((30.0, 200.0))),
        patch.dict(watch_defaults, clock=lambda: world.now),
        patch.dict(wait_defaults, clock=lambda: world.now, pause=world.sleep),
        patch.object(supervisor, "SignalPipe", lambda *numbers: _Signals(world)),
        patch.object(supervisor, "adopt_orphans", lambda: None),
        patch.object(supervisor, "start", start_script),
        patch.object(step, "rank_processes", lambda job_id: []),
        patch.object(supervisor, "is_alive", lambda number: ticks(number) is not None),
        patch.object(supervisor, "tree", _NoTree),
        patch.object(sys, "stderr", _Log(world)),
        patch.object(pwd, "getpwuid", _read_user), patch.object(search, "_site_files", _site_files),
        patch.object(ImmutableSandboxedEnvironment, "compile", _compile),
    ]  # fmt: skip
    cluster_name.cache_clear()
    for one in patches:
        one.start()
    _active = files
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: world.warnings.append(str(message))
        try:
            yield files
        finally:
            try:
                world.close()
            finally:
                _active = None
                for one in reversed(patches):
                    one.stop()
                cluster_name.cache_clear()


class _Failing:
    """A file whose writing may fail."""

    def __init__(self, file: Any, world: World, root: str) -> None:
        self._file, self._world, self._root = file, world, root

    def write(self, data: bytes) -> int:
        process = self._world.current
        detail = self._world.point("write") if process is not None else None
        if process is not None and detail is not None:
            self._file.write(data[: len(data) // 2])
            if detail in ("torn", "short"):
                self._file.flush()
                self._world.kill(process)
            path = os.readlink(f"/proc/self/fd/{self._file.fileno()}")
            self._world.log(f"{process.name}: {detail} on {path.removeprefix(self._root)}")
            raise file_error(detail, "")
        written: int = self._file.write(data)
        return written

    def __enter__(self) -> _Failing:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _Locks:
    """Locks of files, which end with their descriptor or with their process."""

    def __init__(self, world: World) -> None:
        self._world, self._close = world, os.close
        self._held: dict[str, tuple[Process, int]] = {}

    def lock(self, descriptor: int, *, wait: bool = True, by_process: bool = False) -> bool:
        process, path = self._world.current, os.readlink(f"/proc/self/fd/{descriptor}")
        assert process is not None
        while (held := self._held.get(path)) is not None and held[0] is not process and held[0].alive:
            if not wait:
                raise BlockingIOError
            self._world.sleep(0.5)
        self._held[path] = (process, descriptor)
        return True

    def close(self, descriptor: int) -> None:
        for path, (process, held) in list(self._held.items()):
            if (process, held) == (self._world.current, descriptor):
                del self._held[path]
        self._close(descriptor)


class _Numbers:
    """Submissions of each process, from 0."""

    def __init__(self, world: World) -> None:
        self._world, self._counts = world, dict[int, int]()

    def __next__(self) -> int:
        pid = os.getpid()
        self._counts[pid] = self._counts.get(pid, -1) + 1
        return self._counts[pid]


class _NoTimer:
    def __init__(self, *_: Any) -> None:
        self.daemon = True

    def start(self) -> None:
        pass

    def cancel(self) -> None:
        pass


class _Log(io.StringIO):
    """Standard error: lines of hpcjobs go to the trace."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def write(self, text: str) -> int:
        if text.strip() and self._world.current is not None:
            self._world.log(f"{self._world.current.name}: {text.strip()}")
        return len(text)


def clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
