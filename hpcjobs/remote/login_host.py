"""Prepares a login host for hpcjobs: hpcjobs itself, the laptop's site files, a folder for the code."""

from __future__ import annotations

import functools
import hashlib
import io
import re
import shlex
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hpcjobs import __version__
from hpcjobs.errors import HpcJobsError
from hpcjobs.remote.connection import LoginConnection, last_lines
from hpcjobs.site.search import site_files
from hpcjobs.site.trust import list_untrusted, refusal
from hpcjobs.site.yaml_file import read_chain
from hpcjobs.wheel import build_wheel, digest_package

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

        Raises:
            HpcJobsError: that is not possible; names the reason.
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

    Raises:
        ConfigError: ``named`` is of a project and not trusted, or a file that it extends is missing.
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
