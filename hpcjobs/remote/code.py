"""The laptop's folder of code, copied to the login host."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from hpcjobs.errors import CommandMissingError, RequestError
from hpcjobs.files import state_dir, write_beside
from hpcjobs.remote.connection import LoginConnection
from hpcjobs.run.folder import LARGEST, ask_git, code_files
from hpcjobs.units import human_bytes


class CodeFolder(NamedTuple):
    """A folder of code on the laptop: the repository that the current folder is in, or the current folder."""

    root: Path
    below: Path
    """The current folder, relative to ``root``."""

    @property
    def name(self) -> str:
        """Its name on the login host: two laptops, or two folders of one name, do not share one."""
        digest = hashlib.sha256(f"{os.uname().nodename}\0{self.root}".encode("utf-8", "surrogateescape")).hexdigest()
        plain = re.sub(r"[^\w.-]", "_", self.root.name, flags=re.ASCII) or "root"
        return f"{plain}-{digest[:8]}"


def find_code() -> CodeFolder:
    """The folder of code that the current folder belongs to."""
    here = Path.cwd()
    try:
        answer = ask_git(here, "rev-parse", "--show-toplevel")
    except CommandMissingError:
        return CodeFolder(here, Path())
    root = Path(answer.out.rstrip("\n")) if answer.code == 0 else here
    return CodeFolder(root, here.resolve().relative_to(root.resolve()))


def copy_code(code: CodeFolder, connection: LoginConnection, target: str) -> None:
    """Copy all files that git does not ignore to ``target``, and remove copies of files that no longer exist here.

    Files that jobs have written there stay.

    Raises:
        RequestError: too much, or a home folder. HpcJobsError: rsync failed.
    """
    files = sorted(map(str, _chosen_files(code.root)))
    record = _record(connection, target)
    before = set(filter(None, _read(record).split("\0")))
    write_beside(record, "\0".join(sorted(before.union(files))))
    options = ("-lptzs", "--files-from=-", "--from0")
    source = f"{code.root}/".replace("//", "/")
    connection.copy([*options, source, connection.path_there(f"{target}/")], given="\0".join(files))
    removed = sorted(before.difference(files))
    if removed:
        script = f"cd -- {shlex.quote(target)} && xargs -0 rm -f --"
        connection.run(script, given=os.fsencode("\0".join(removed)))
    write_beside(record, "\0".join(files))


def _chosen_files(root: Path) -> list[Path]:
    hint = "start from the folder that holds the code, and leave data out by .gitignore"
    if root == Path.home() or root == Path(root.anchor):
        raise RequestError(f"{root} would be copied to the login host: it is no folder of code", hint=hint)
    files = code_files(root)
    size = sum((root / path).lstat().st_size for path in files)
    if size > LARGEST:
        raise RequestError(
            f"the code in {root} has {human_bytes(size)}, at most {human_bytes(LARGEST)} are copied", hint=hint
        )
    return files


def _record(connection: LoginConnection, target: str) -> Path:
    """The path of the list of copied files."""
    folder = state_dir() / "remote"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    digest = hashlib.sha256(f"{connection.destination}\0{target}".encode("utf-8", "surrogateescape")).hexdigest()
    return folder / f"{digest[:16]}.files"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="surrogateescape") if path.exists() else ""
