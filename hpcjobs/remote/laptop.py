"""A command of the laptop, run on the login host."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar

import msgspec

from hpcjobs.errors import CommandMissingError, HpcJobsError, RequestError
from hpcjobs.files import AppendStore, state_dir, write_beside
from hpcjobs.remote.connection import LoginConnection, NoConnectionError
from hpcjobs.remote.login_host import LoginHost, pack_sites
from hpcjobs.remote.outputs import OUTPUTS
from hpcjobs.run.folder import LARGEST, ask_git, code_files
from hpcjobs.run.submission import VARIABLE
from hpcjobs.site.models import Login
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


class Unanswered(msgspec.Struct, frozen=True):
    """A command that was sent."""

    token: str
    sent: float
    """Seconds since 1970."""


class _SubmissionLine(Unanswered, frozen=True, kw_only=True):
    """A line of the record: a command was sent, or answered."""

    command: str
    """Digest of host, folder and arguments."""
    answered: bool = False


def find_or_record(destination: str, arguments: Sequence[str]) -> tuple[Unanswered, bool]:
    """The unanswered command with this folder and ``arguments``, and True; or a new record, and False."""
    newest = _newest(destination, arguments)
    if newest is not None and not newest.answered:
        return Unanswered(newest.token, newest.sent), True
    sent = Unanswered(secrets.token_hex(16), time.time())
    _append(_SubmissionLine(sent.token, sent.sent, command=_digest(destination, arguments)))
    return sent, False


def mark_answered(destination: str, arguments: Sequence[str]) -> None:
    """Record the answer: the same command typed again is a new one."""
    newest = _newest(destination, arguments)
    if newest is not None and not newest.answered:
        _append(msgspec.structs.replace(newest, answered=True))


def _newest(destination: str, arguments: Sequence[str]) -> _SubmissionLine | None:
    """The last line about the command; lines that a full disk cut short are left out."""
    digest, newest = _digest(destination, arguments), None
    for stored in _store().read(_raise):
        if digest.encode() in stored.text:
            with contextlib.suppress(msgspec.MsgspecError):
                newest = msgspec.json.decode(stored.text, type=_SubmissionLine)
    return newest


def _append(line: _SubmissionLine) -> None:
    _store().append([msgspec.json.encode(line).decode()])


def _store() -> AppendStore:
    return AppendStore("remote", "sent")


def _raise(error: OSError) -> None:
    raise error


def _digest(destination: str, arguments: Sequence[str]) -> str:
    key = "\0".join((destination, os.getcwd(), *arguments))
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]


OFF = "HPCJOBS_REMOTE"
RESULTS = Path("results")
"""Folder below the current one for files that a command wrote on the login host."""
_OF_GIT = (".git", "head")
"""A folder with a file HEAD can be a bare repository, and git runs programs that its configuration names."""
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)
Say = Callable[[str], None]
Answer = TypeVar("Answer")
_HANDED_ON = ("NO_COLOR", "HPCJOBS_DEBUG", "HPCJOBS_READ_ONLY", "HPCJOBS_BUDGET")
"""Variables of this environment that hold on the login host too."""


class Target(NamedTuple):
    """The login host and the site for the commands of this laptop."""

    login: Login
    site: str | None
    """The site to use there where a command names none."""
    site_file: Path | None
    """The site's file, where it was named by its path."""


def choose_place(root: Path, name: str | PurePosixPath) -> Path:
    """The path below ``root`` for a file or folder that a login host calls ``name``; never outside or through a link.

    Raises:
        HpcJobsError: the name leads elsewhere, or to a folder of git.
    """
    parts = PurePosixPath(name).parts
    if not parts or any(part in ("/", "..") or part.lower() in _OF_GIT for part in parts):
        raise HpcJobsError(f"the login host names a file {str(name)!r}, which is no place below {root}: not fetched")
    place = root
    for part in parts:
        place /= part
        if place.is_symlink():
            raise HpcJobsError(f"{place} is a link, and what a login host sends follows none: not fetched")
    return place


class Laptop:
    """This machine, connected to a login host."""

    def __init__(self, target: Target, *, say: Say) -> None:
        self._target, self._say = target, say
        self._code = find_code()
        self.connection = LoginConnection(target.login)
        sites = pack_sites(target.site_file)
        self._host = LoginHost(self.connection, sites, code_name=self._code.name, say=say)

    def connect(self, *, with_code: bool) -> None:
        """Open the connection and prepare the login host; ``with_code``: copy the current code too.

        Raises:
            HpcJobsError: that is not possible.
        """
        self.connection.open()
        self._place = self._host.prepare()
        if with_code:
            copy_code(self._code, self.connection, self._place.code)

    def script(self, arguments: Sequence[str], *, environment: Mapping[str, str] | None = None) -> str:
        """Lines of bash that run ``hpcjobs ARGUMENTS`` in the copy of the current folder."""
        folder = str(Path(self._place.code, self._code.below))
        settings = {OFF: "no", **({"HPCJOBS_SITE": self._target.site} if self._target.site else {})}
        settings |= {name: os.environ[name] for name in _HANDED_ON if name in os.environ}
        exports = (
            f"export {name}={shlex.quote(value)}\n" for name, value in {**settings, **(environment or {})}.items()
        )
        return (
            f"mkdir -p -- {shlex.quote(folder)} && cd -- {shlex.quote(folder)} || exit\n"
            f"{self._host.environment(self._place)}{''.join(exports)}"
            f"{self._host.hpcjobs(self._place)} {shlex.join(arguments)}\n"
        )

    def run(self, arguments: Sequence[str], *, submits: bool) -> int:
        """Run ``hpcjobs ARGUMENTS`` there with this terminal; its exit code.

        If it ``submits``, the code is copied first, and a connection that breaks is opened again; no job is submitted
        twice. Files that the command was asked to write are fetched.

        Raises:
            NoConnectionError: the login host is out of reach.
        """
        self.connect(with_code=submits)
        if not submits:
            return self._run_connected(arguments, {})
        return self.submit(arguments, lambda environment: self._run_connected(arguments, environment))

    def submit(self, arguments: Sequence[str], send: Callable[[Mapping[str, str]], Answer]) -> Answer:
        """Have ``send`` run ``arguments`` there, with the environment that it is given, until there is an answer.

        A connection that breaks is opened again. The environment has the same token each time, also when the same
        command is typed again, so that no job is submitted twice.

        Raises:
            NoConnectionError: the login host is out of reach. HpcJobsError: raised by ``send``; it counts as an answer.
        """
        unanswered, is_repeated = find_or_record(self.connection.destination, arguments)
        if is_repeated:
            at = time.strftime("%F %H:%M", time.localtime(unanswered.sent))
            self._say(f"this command was sent at {at} and got no answer: what it submitted then is not submitted again")
        try:
            answer = self._send_until_answered(lambda: send({VARIABLE: unanswered.token}))
        except NoConnectionError:
            raise
        except HpcJobsError:
            mark_answered(self.connection.destination, arguments)
            raise
        mark_answered(self.connection.destination, arguments)
        return answer

    def _send_until_answered(self, send: Callable[[], Answer]) -> Answer:
        pauses = iter(_PAUSES_S)
        while True:
            with suppress(NoConnectionError):
                return send()
            while not self._reconnect(next(pauses, None)):
                pass

    def _reconnect(self, pause_s: float | None) -> bool:
        """Whether the connection is there again after the pause.

        Raises:
            NoConnectionError: there was no pause left.
        """
        lost = f"the connection to {self.connection.destination} is lost"
        if pause_s is None:
            hint = "it may have submitted: type the same command here again, which submits nothing twice"
            raise NoConnectionError(lost, hint=hint)
        self._say(f"{lost}; trying again in {pause_s:g} s")
        time.sleep(pause_s)
        try:
            self.connect(with_code=False)
        except NoConnectionError:
            return False
        return True

    def _run_connected(self, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
        outputs = f"{self._place.data}/outputs-{os.uname().nodename}-{os.getpid()}"
        code = self.connection.run_here(self.script(arguments, environment={**environment, OUTPUTS: outputs}))
        if self.connection.is_lost(code):
            raise NoConnectionError(f"the connection to {self.connection.destination} is lost")
        self._fetch_outputs(outputs)
        return code

    def _fetch_outputs(self, record: str) -> None:
        quoted = shlex.quote(record)
        answer = self.connection.run(f"[ ! -e {quoted} ] || {{ cat -- {quoted}; rm -f -- {quoted}; }}")
        here = PurePosixPath(self._place.code, self._code.below)
        for path in map(PurePosixPath, answer.out.splitlines()):
            local = choose_place(RESULTS, path.relative_to(here) if path.is_relative_to(here) else path.name)
            self.fetch(str(path), local)
            self._say(f"fetched {local}")

    def fetch(self, path: str, local: Path, *, without: Iterable[str] = ()) -> None:
        """Copy a file or folder of the login host to ``local``, without links and execute bits.

        Raises:
            HpcJobsError: it cannot be read there, or written here.
        """
        local.parent.mkdir(parents=True, exist_ok=True)
        test = self.connection.run(f"[ -d {shlex.quote(path)} ]")
        end = "/" if test.code == 0 else ""
        excluded = (
            "--exclude=.[gG][iI][tT]",
            "--exclude=[hH][eE][aA][dD]",
            *(f"--exclude=/{name}" for name in without),
        )
        modes = "--chmod=D700,F600"  # by the rsync of this side, whatever the other one sends
        self.connection.copy(
            ["-rptz", "--no-links", modes, *excluded, "-s", self.connection.path_there(f"{path}{end}"), f"{local}{end}"]
        )
