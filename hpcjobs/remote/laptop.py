"""A command of the laptop, run on the login host, which it prepares: hpcjobs, site files, a folder for the code."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import re
import secrets
import shlex
import tarfile
import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar

import msgspec

from hpcjobs import __version__
from hpcjobs.errors import CommandMissingError, HpcJobsError, RequestError
from hpcjobs.files import AppendStore, make_folder, state_dir, write_beside
from hpcjobs.packing import build_wheel, digest_package
from hpcjobs.remote.connection import OUTPUTS, LoginConnection, NoConnectionError, last_lines
from hpcjobs.run import index
from hpcjobs.run.folder import LARGEST, ask_git, code_files
from hpcjobs.run.submission import VARIABLE
from hpcjobs.site.models import Login
from hpcjobs.site.search import site_files
from hpcjobs.site.trust import list_untrusted, refusal
from hpcjobs.site.yaml_file import read_chain
from hpcjobs.sweeps.folder import list_sweeps
from hpcjobs.units import human_bytes

_MARK = "hpcjobs-laptop:"
_NO_PYTHON, _OLD_PYTHON = 41, 42

# Lines of the answer begin with the mark: the shell's start-up files may print others.
_PREPARE = """
data=${{XDG_DATA_HOME:-$HOME/.local/share}}/hpcjobs
code={code}/{name}
mkdir -p -- "$code" || exit
is() {{ [ "$1" "$data/$2" ] && printf '%syes\\n' {mark} || printf '%sno\\n' {mark}; }}
printf '{mark}%s\\n' "$data" "$code"
is -x installed/{wheel}/bin/hpcjobs
is -d sites/{sites}
"""

_INSTALL = """
python={python}
if [ -n "$python" ]; then
  "$python" -c "$check" || exit {old}
else
  own=$(command -v hpcjobs) && [ "$("$own" --version 2>&1)" = "hpcjobs {version}" ] || own=
  for name in python3.14 python3.13 python3.12 python3.11 python3.10 python3; do
    python=$(command -v "$name") && "$python" -c {check} 2>&1 && break
    python=
  done
  if [ -z "$python" ] && [ -z "$own" ]; then
    printf 'PATH is %s\\n' "$PATH"
    command -v python3 && python3 --version
    exit {missing}
  fi
fi
data=${{XDG_DATA_HOME:-$HOME/.local/share}}/hpcjobs
mkdir -p -- "$data/installed" && made=$(mktemp -d "$data/installed/{wheel}.XXXXXX") || exit
if [ -n "$own" ]; then
  cat >/dev/null; mkdir "$made/bin" && ln -s "$own" "$made/bin/hpcjobs"
else
  cat >"$made/{file}" && "$python" -m venv "$made" 2>&1 &&
    "$made/bin/python" -m pip install --quiet --disable-pip-version-check "$made/{file}" 2>&1
fi || {{ code=$?; rm -rf -- "$made"; exit "$code"; }}
ln -sn "$made" "$data/installed/{wheel}" 2>/dev/null || rm -rf -- "$made"
"""
_CHECK = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))"


class RemoteFolders(NamedTuple):
    """Folders of hpcjobs on a login host."""

    data: str
    code: str
    """The copy of the laptop's folder of code."""
    has_hpcjobs: bool
    has_sites: bool


class SiteFiles(NamedTuple):
    """The laptop's site files, packed."""

    content: bytes
    sha256: str


class LoginHost:
    """hpcjobs on a login host, brought there where it is missing."""

    def __init__(
        self, connection: LoginConnection, sites: SiteFiles, *, code_name: str, say: Callable[[str], None]
    ) -> None:
        self._connection, self._sites, self._code_name, self._say = connection, sites, code_name, say

    def prepare(self) -> RemoteFolders:
        """Make the folders, install hpcjobs and send the site files where they are not there yet.

        Raises HpcJobsError: that is not possible; names the reason.
        """
        login = self._connection.login
        script = _PREPARE.format(
            code=_expand_there(login.code),
            name=self._code_name,
            mark=_MARK,
            wheel=_version_name(),
            sites=self._sites.sha256,
        )
        result = self._connection.run(script)
        lines = [line.removeprefix(_MARK) for line in result.out.splitlines() if line.startswith(_MARK)]
        if result.code != 0 or len(lines) != len(RemoteFolders._fields):
            raise HpcJobsError(
                f"{login.destination}: no folder for the code: {last_lines(result.err)}",
                hint="login.code of the site file says where it is to be",
            )
        place = RemoteFolders(lines[0], lines[1], lines[2] == "yes", lines[3] == "yes")
        if not place.has_sites:
            self._send_sites(place)
        if login.command is None and not place.has_hpcjobs:
            self._install()
        return place

    def hpcjobs(self, place: RemoteFolders) -> str:
        """The command of hpcjobs there, as words of bash."""
        own = f"exec {shlex.quote(f'{place.data}/installed/{_version_name()}/bin/hpcjobs')}"
        return self._connection.login.command or own

    def environment(self, place: RemoteFolders) -> str:
        """Lines of bash that put the laptop's site files on the search path."""
        folder = f"{place.data}/sites/{self._sites.sha256}"
        return (
            f"export HPCJOBS_USER_SITES={shlex.quote(f'{folder}/named:{folder}/user')}\n"
            f"export HPCJOBS_SITE_PATH={shlex.quote(f'{folder}/centre')}${{HPCJOBS_SITE_PATH:+:$HPCJOBS_SITE_PATH}}\n"
        )

    def _send_sites(self, place: RemoteFolders) -> None:
        folder = shlex.quote(f"{place.data}/sites")
        name = self._sites.sha256
        script = (
            f"umask 077; mkdir -p -- {folder} && cd -- {folder} && made=$(mktemp -d ./new.XXXXXX) && "
            f'tar -x -f - -C "$made" && mv -nT -- "$made" {name} && rm -rf -- "$made"'
        )
        result = self._connection.run(script, given=self._sites.content)
        if result.code != 0:
            raise HpcJobsError(
                f"{self._connection.destination}: the site files did not get there: {last_lines(result.err)}"
            )

    def _install(self) -> None:
        login = self._connection.login
        wheel = build_wheel()
        self._say(f"installing hpcjobs {__version__} on {login.destination}, once")
        script = _INSTALL.format(
            python=shlex.quote(login.python or ""),
            check=shlex.quote(_CHECK),
            version=__version__,
            wheel=_version_name(),
            file=wheel.name,
            old=_OLD_PYTHON,
            missing=_NO_PYTHON,
        )
        result = self._connection.run(f"check={shlex.quote(_CHECK)}\n{script}", given=wheel.content)
        if result.code == 0:
            return
        shown = last_lines(result.out.strip() or result.err)
        hint = "login: {python: /path/to/python3} of the site file names one, login: {command: ...} an hpcjobs"
        if result.code == _NO_PYTHON:
            raise HpcJobsError(
                f"{login.destination} has no Python 3.10 or newer with venv in a login shell: {shown}", hint=hint
            )
        if result.code == _OLD_PYTHON:
            raise HpcJobsError(
                f"{login.destination}: {login.python} (login.python) is no Python 3.10 or newer with venv: {shown}",
                hint=hint,
            )
        raise HpcJobsError(
            f"{login.destination}: hpcjobs could not be installed there: {shown}",
            hint="can that host reach a package index (pip config)? Else install it there by hand, and name it: "
            "login: {command: /path/to/hpcjobs}",
        )


@functools.cache
def _version_name() -> str:
    """Name of the folder for this version and content of hpcjobs."""
    return f"{__version__}-{digest_package()[:12]}"


def pack_sites(named: Path | None) -> SiteFiles:
    """Pack the file ``named`` with the files in its folder that it extends, and the files of the user and the centre.

    Files of the project are copied with the code.

    Raises ConfigError: ``named`` is of a project and not trusted, or a file that it extends is missing.
    """
    packed = io.BytesIO()
    folders = {"named": _chain_beside(named), "user": site_files("user"), "centre": site_files("centre")}
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, paths in folders.items():
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o700
            archive.addfile(folder)
            contents: dict[str, bytes] = {}
            for path in paths:
                contents.setdefault(path.name, path.read_bytes())
            for file, content in sorted(contents.items()):
                info = tarfile.TarInfo(f"{name}/{file}")
                info.size, info.mode = len(content), 0o600
                archive.addfile(info, io.BytesIO(content))
    content = packed.getvalue()
    return SiteFiles(content, hashlib.sha256(content).hexdigest()[:16])


def _chain_beside(named: Path | None) -> list[Path]:
    """``named`` and the files in its folder that it extends; further ones are the user's, the centre's or shipped."""
    if named is None:
        return []
    files = read_chain(named.expanduser().absolute())
    if untrusted := list_untrusted(files):
        raise refusal(named, untrusted)
    return [file.path for file in files if file.path.parent == files[0].path.parent]


def _expand_there(path: str) -> str:
    """``path`` as a word of bash in which only ``~`` and ``$VARIABLES`` are expanded."""
    home = re.match(r"~(?=/|\Z)", path)
    parts = re.split(r"\$(?:\{(\w+)\}|(\w+))", path[1:] if home else path)
    arguments = ['"$HOME"'] if home else []
    for number in range(0, len(parts), 3):
        arguments.append(shlex.quote(parts[number]) if parts[number] else "")
        variable = next(filter(None, parts[number + 1 : number + 3]), None)
        if variable is not None:
            arguments.append(f'"${{{variable}:?is not set on the login host}}"')
    return "".join(arguments)


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

    Raises RequestError: too much, or a home folder. HpcJobsError: rsync failed.
    """
    files = sorted(map(str, _chosen_files(code.root)))
    record = _record(connection, target)
    copied = record.read_text(encoding="utf-8", errors="surrogateescape") if record.exists() else ""
    before = set(filter(None, copied.split("\0")))
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
    make_folder(folder)
    digest = hashlib.sha256(f"{connection.destination}\0{target}".encode("utf-8", "surrogateescape")).hexdigest()
    return folder / f"{digest[:16]}.files"


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
    for stored in _store().read():
        if digest.encode() in stored.text:
            with contextlib.suppress(msgspec.MsgspecError):
                newest = msgspec.json.decode(stored.text, type=_SubmissionLine)
    return newest


def _append(line: _SubmissionLine) -> None:
    _store().append([msgspec.json.encode(line).decode()])


def _store() -> AppendStore:
    return AppendStore("remote", "sent")


def _digest(destination: str, arguments: Sequence[str]) -> str:
    key = "\0".join((destination, os.getcwd(), *arguments))
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]


OFF = "HPCJOBS_REMOTE"
RESULTS = Path("results")
"""Folder below the current one for files that a command wrote on the login host."""
_OF_GIT = (".git", "head")
"""A folder with a file HEAD can be a bare repository, and git runs programs that its configuration names."""
_LONGEST_NAME, _SHOWN = 255, 300
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

    Raises HpcJobsError: the name leads elsewhere, or to a folder of git.
    """
    parts = PurePosixPath(name).parts
    wrong = any(part in ("/", "..") or "\0" in part or part.lower() in _OF_GIT for part in parts)
    if not parts or wrong or any(len(os.fsencode(part)) > _LONGEST_NAME for part in parts):
        shown = repr(str(name))[:_SHOWN]
        raise HpcJobsError(f"the login host names a file {shown}, which is no place below {root}: not fetched")
    place = root
    for part in ("", *parts):
        place /= part
        if place.is_symlink():
            raise HpcJobsError(f"{place} is a link, and what a login host sends follows none: not fetched")
    return place


def _require_no_own(place: Path) -> None:
    """Refuse a place whose files would be taken for those of a job or sweep that this user has submitted here.

    Raises HpcJobsError: it is, lies in, or lies above such a folder.
    """
    requested = _fold(place)
    for own in (*(entry.run_dir for entry in index.entries()), *(sweep.path for sweep in list_sweeps())):
        folder = _fold(own)
        if requested.is_relative_to(folder) or folder.is_relative_to(requested):
            raise HpcJobsError(
                f"{place} is no place for files of a login host: {own} is the folder of a job or sweep that you have"
                " submitted on this machine, and its files decide what runs as you: not fetched",
                hint="`fetch JOB --to FOLDER` copies to a folder with none of your jobs; other commands copy below the"
                " current one",
            )


def _fold(path: str | Path) -> PurePosixPath:
    """Return ``path`` without links, alike for names that the file system of a laptop may take for one."""
    return PurePosixPath(unicodedata.normalize("NFC", os.path.realpath(path).casefold()))


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

        Raises HpcJobsError: that is not possible.
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

        Raises NoConnectionError: the login host is out of reach.
        """
        self.connect(with_code=submits)
        if not submits:
            return self._run_connected(arguments, {})
        return self.submit(arguments, lambda environment: self._run_connected(arguments, environment))

    def submit(self, arguments: Sequence[str], send: Callable[[Mapping[str, str]], Answer]) -> Answer:
        """Have ``send`` run ``arguments`` there, with the environment that it is given, until there is an answer.

        A connection that breaks is opened again. The environment has the same token each time, also when the same
        command is typed again, so that no job is submitted twice.

        Raises NoConnectionError: the login host is out of reach. HpcJobsError: raised by ``send``; it counts as an
        answer.
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
        """Whether the connection is there again after the pause. Raises NoConnectionError: there was no pause left."""
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

        Raises HpcJobsError: it cannot be read there, or written here, or would lie among the user's own jobs.
        """
        _require_no_own(local)
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
