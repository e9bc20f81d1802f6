"""The run folder: everything a job was, did and left, in one place that only its owner can read.

    NAME-DATE-TIME-RANDOM/
      job.sh            the script that was sent
      shell/            bash files that job.sh uses on the node
      batch_script      the user's own, which job.sh runs, where the job is one
      node.pyz          decides about further attempts on the node, with --retries
      figures.pyz       reads figures of merit from the log, if the job has figures; figures.log
      monitor.pyz       samples the nodes, with --monitor or hpcjobs monitor; monitor.log
      attempts.jsonl, control/   how its attempts ended; where program and node.pyz meet
      manifest.json     every resolved value with its source; versions; git commit
      code.patch        differences from that commit
      code/             the code itself, with --snapshot
      submitted.json    job id and cluster, once the scheduler took it
      logs/             NAME_ID.out
      size.json         why it has its size, with `submit -N auto`
      state.json        written by the job: where it stands, how it ended
      accounting.json   the scheduler's last record of the job, once it has been read
      requeued.json     the end after which the job was requeued with hpcjobs
      metrics.jsonl, summary.json, checkpoints/   from the trainer, or figures of its log

Tasks of a job array have the part below ``logs/`` in a folder of their own, named by the index.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec

from hpcjobs import __version__
from hpcjobs.errors import CommandMissingError, HpcJobsWarning, RequestError
from hpcjobs.files import make_folder, require_unplanted, user_name, write_beside
from hpcjobs.job.environment import FIGURES_PROGRAM, MONITOR_PROGRAM, SHELL_FOLDER, shell_files
from hpcjobs.job.models import Plan
from hpcjobs.packing import pack
from hpcjobs.processes.programs import Result, run
from hpcjobs.record import BATCH_SCRIPT, MANIFEST
from hpcjobs.record.manifest import Manifest, RecordedCode, write_manifest
from hpcjobs.units import human_bytes

NODE_PROGRAM = "node.pyz"


def create(plan: Plan, code: CodeState | None) -> None:
    """Make the plan's run folder completely or not at all; ``code``: `code_state` of the folder it runs in.

    Raises RequestError: the place cannot be written, or the code is too large for a snapshot.
    """
    root = plan.run_dir.parent
    try:
        make_root(root)
        plan.run_dir.mkdir(mode=0o700)
        (plan.run_dir / "logs").mkdir(mode=0o700)
    except OSError as error:
        raise RequestError(
            f"run folder {plan.run_dir} cannot be made: {error.filename}: {error.strerror}",
            hint="run_root of the site file says where",
        ) from error
    try:
        _fill(plan, code)
    except OSError as error:
        remove(plan)
        where = f" ({error.filename2 or error.filename})" if error.filename else ""
        raise RequestError(
            f"run folder {plan.run_dir} cannot be filled: {error.strerror}{where}",
            hint="is the disk full, or the quota used up? run_root of the site file says where run folders lie",
        ) from error
    except BaseException:
        remove(plan)
        raise


def remove(plan: Plan) -> None:
    """Remove the run folder of a job that was not accepted."""
    shutil.rmtree(plan.run_dir)


def make_root(root: Path) -> None:
    """Make the folder of run folders, if it is not there.

    Raises OSError: it cannot be made, or another user has made it where everybody may.
    """
    require_unplanted(root)
    if not root.is_dir():
        make_folder(root, 0o775)  # never for everybody, whatever the umask: programs start from it
        require_unplanted(root)  # another user may have been faster
        write_beside(root / ".gitignore", "*\n", mode=None, durable=False)


def write_shell_files(run_dir: Path, script: str) -> None:
    """Put the shell files that ``script`` uses into a run folder."""
    (run_dir / SHELL_FOLDER).mkdir(mode=0o700)
    for name, text in shell_files(script).items():
        write_beside(run_dir / SHELL_FOLDER / name, text)


def _fill(plan: Plan, code: CodeState | None) -> None:
    job = plan.job
    manifest = Manifest(
        job=msgspec.to_builtins(job),
        command_line=plan.made_by,
        command=list(plan.command),
        created=time.time(),
        user=user_name(),
        host=os.uname().nodename,
        hpcjobs=__version__,
        code=None if code is None else RecordedCode(code.commit, code.dirty, list(code.untracked), code.missing),
    )
    if code is not None and code.missing and code.dirty:
        warnings.warn(f"code.patch does not have {code.missing}", HpcJobsWarning, stacklevel=2)
    if code is not None and code.patch:
        write_beside(plan.run_dir / "code.patch", code.patch)
    if job.snapshot:
        copy_code(Path(job.chdir), plan.run_dir / "code", leave_out=plan.run_dir.parent)
    write_manifest(plan.run_dir, manifest)
    if job.retries is not None:
        write_beside(plan.run_dir / NODE_PROGRAM, pack("hpcjobs.node"))
    if job.monitor:
        write_beside(plan.run_dir / MONITOR_PROGRAM, pack("hpcjobs.node.monitor"))
    if job.figures:
        write_beside(plan.run_dir / FIGURES_PROGRAM, pack("hpcjobs.node.figures"))
    write_shell_files(plan.run_dir, plan.script)
    if job.batch_script is not None:
        write_beside(plan.run_dir / BATCH_SCRIPT, job.batch_script, mode=0o700)
    # Last: a folder without it was surely not submitted (`adopt_job`), and one with it has all that its job reads.
    write_beside(plan.run_dir / "job.sh", plan.script, mode=0o700)


_SUBMODULES = "--ignore-submodules=dirty"
_SETTINGS = ("core.fsmonitor=false", "core.hooksPath=/dev/null", "safe.bareRepository=explicit", "color.ui=false")


def ask_git(folder: Path, *arguments: str) -> Result:
    """Run ``git ARGUMENTS`` in ``folder`` without its monitors and hooks, and without writing to the repository.

    Raises CommandMissingError: git is not installed.
    """
    return run([*_command(folder, _SETTINGS), *arguments])


def read_difference(folder: Path) -> str:
    """Differences from the commit for `git apply`: every byte, carriage returns too."""
    with TemporaryDirectory() as place:
        patch = Path(place, "patch")
        options = ("--no-ext-diff", "--no-textconv", "--no-color", "--binary", "--submodule=short", _SUBMODULES)
        settings = (*_SETTINGS, *_filters_off(folder))
        run([*_command(folder, settings), "diff", *options, f"--output={patch}", "HEAD"])
        return patch.read_bytes().decode("utf-8", "surrogateescape") if patch.exists() else ""


def _command(folder: Path, settings: Sequence[str]) -> list[str]:
    return ["git", "--no-optional-locks", "-C", str(folder), *(part for one in settings for part in ("-c", one))]


def _filters_off(folder: Path) -> list[str]:
    """Settings without the filters (`clean`, `process`) that the repository itself configures; the user's stay."""
    options = ("-z", "--show-scope", "--name-only", "--get-regexp", r"^filter\.")
    fields = run([*_command(folder, _SETTINGS), "config", *options]).out.split("\0")
    keys = {key for scope, key in zip(fields[::2], fields[1::2], strict=False) if scope in ("local", "worktree")}
    names = sorted({key.removeprefix("filter.").rpartition(".")[0] for key in keys})
    if strange := [name for name in names if "=" in name or "\n" in name]:
        raise RequestError(
            f"the repository of {folder} configures the filter {strange[0]!r}, which cannot be switched off",
            hint="git config --show-origin --get-regexp filter: remove it, or rename it without '='",
        )
    values = {"clean": "", "process": "", "required": "false"}
    return [f"filter.{name}.{key}={value}" for name in names for key, value in values.items()]


_LARGEST_PATCH = 20 << 20


class CodeState(NamedTuple):
    """The git state of a folder."""

    commit: str | None
    """None in a repository without a commit."""
    dirty: bool
    """Tracked files differ from the commit."""
    untracked: list[str]
    patch: str
    """``git diff HEAD --binary``; empty when clean or over 20 MiB."""
    missing: str | None = None
    """Changes that `patch` does not contain, and why."""


def code_state(folder: Path) -> CodeState | None:
    """The state of the repository ``folder`` is in; None outside one or without git.

    Two git processes for a clean tree, four for a changed one. No process where no folder above has a ``.git``.
    """
    if "GIT_DIR" not in os.environ and not any(os.path.lexists(each / ".git") for each in (folder, *folder.parents)):
        return None
    try:
        settings = (*_SETTINGS, *_filters_off(folder))
        # Changes within submodules are left out: git would use their configuration.
        status = run([*_command(folder, settings), "status", "--porcelain=v2", "--branch", "-z", _SUBMODULES])
    except CommandMissingError:
        return None
    if "dubious ownership" in status.err:
        warnings.warn(
            f"no commit and no code.patch of {folder} are kept: another user owns the repository"
            " (git config --global --add safe.directory FOLDER lets git read it)",
            HpcJobsWarning,
            stacklevel=2,
        )
    if status.code != 0:
        return None
    entries = status.out.split("\0")
    commit = next((e.removeprefix("# branch.oid ") for e in entries if e.startswith("# branch.oid ")), "(initial)")
    untracked = [_printable(entry[2:]) for entry in entries if entry.startswith("? ")]
    dirty = any(entry[:2] in ("1 ", "2 ", "u ") for entry in entries)
    known = None if commit == "(initial)" else commit
    patch = read_difference(folder) if dirty and known else ""
    missing = _say_missing(folder, patch)
    return CodeState(known, dirty, untracked, patch if len(patch) <= _LARGEST_PATCH else "", missing)


def _say_missing(folder: Path, patch: str) -> str | None:
    if len(patch) > _LARGEST_PATCH:
        return f"the changes since the commit, which are {len(patch) >> 20} MiB, more than {_LARGEST_PATCH >> 20} MiB"
    top = next((each for each in (folder, *folder.parents) if os.path.exists(each / ".git")), folder)
    return "changes within submodules" if os.path.exists(top / ".gitmodules") else None


def _printable(name: str) -> str:
    r"""A file's name as text: bytes that are no UTF-8, and control characters, as ``\xff``."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


LARGEST = 512 << 20
_NOT_CODE = frozenset(
    (".git", ".venv", "venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", "node_modules")
)


def copy_code(source: Path, target: Path, *, leave_out: Path) -> None:
    """Copy ``source`` to ``target``: files that git tracks or would track; outside git all but the usual caches.

    Raises RequestError: over 512 MiB; data does not belong in a snapshot.
    """
    # The copy in a run folder is complete already, and git ignores run folders.
    if source.name == "code" and (source.parent / MANIFEST).is_file():
        files = list(_walk(source))
    else:
        files = [path for path in code_files(source) if not (source / path).is_relative_to(leave_out)]
    size = sum((source / path).lstat().st_size for path in files)
    if size > LARGEST:
        raise RequestError(
            f"--snapshot: {source} holds {human_bytes(size)}, the limit is {human_bytes(LARGEST)}",
            hint="leave data out with .gitignore, or start from the folder that holds the code",
        )
    target.mkdir(mode=0o700)
    for path in files:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        _copy(source, path, target)


def _copy(source: Path, path: Path, target: Path) -> None:
    """Copy a file or link; a relative link out of ``source`` leads to the same place from the copy."""
    link = source / path
    if link.is_symlink() and not os.path.isabs(os.readlink(link)):
        leads_to = os.path.normpath(link.parent.resolve() / os.readlink(link))
        if not Path(leads_to).is_relative_to(source.resolve()):
            (target / path).symlink_to(leads_to)
            return
    shutil.copy2(link, target / path, follow_symlinks=False)


def code_files(source: Path) -> list[Path]:
    """List files that git tracks or would track below ``source``, in submodules and nested repositories too.

    Outside git: all files except the usual caches and folders that ignore themselves, such as run folders.
    """
    try:
        listed = ask_git(source, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    except CommandMissingError:
        return list(_walk(source))
    if listed.code != 0:
        return list(_walk(source))
    files = []
    for name in (Path(name) for name in listed.out.split("\0") if name):
        if (source / name).is_file() or (source / name).is_symlink():
            files.append(name)
        elif (source / name / ".git").exists():
            files += [name / inner for inner in code_files(source / name)]
    return files


def _walk(source: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(source):
        folders[:] = [name for name in folders if name not in _NOT_CODE and not _ignores_itself(Path(folder, name))]
        for name in (*names, *(name for name in folders if Path(folder, name).is_symlink())):
            yield (Path(folder) / name).relative_to(source)


def _ignores_itself(folder: Path) -> bool:
    try:
        return (folder / ".gitignore").read_text(encoding="utf-8").strip() == "*"
    except (OSError, ValueError):  # no such file, or not readable
        return False
