"""Gives the pip of a build the settings of this user's pip: the same indexes, folders and certificate.

They go in by a file that only the user reads and that stays out of the image: an index's address may hold a password.
"""

from __future__ import annotations

import configparser
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

KEYS = ("index-url", "extra-index-url", "find-links", "cert", "trusted-host", "proxy", "timeout")
_MANY = ("extra-index-url", "find-links", "trusted-host")


def settings(environ: Mapping[str, str] | None = None) -> dict[str, list[str]]:
    """Key -> values, as pip would read them: the environment over the user's file over the machine's."""
    env = os.environ if environ is None else environ
    settings: dict[str, list[str]] = {}
    for path in _files(env):
        parser = configparser.RawConfigParser()
        parser.read(path, encoding="utf-8")
        for section in ("global", "install"):
            for key in KEYS:
                if parser.has_option(section, key):
                    settings[key] = parser.get(section, key).split()
    for key in KEYS:
        if value := env.get(f"PIP_{key.upper().replace('-', '_')}"):
            settings[key] = value.split()
    return settings


def _files(env: Mapping[str, str]) -> Iterator[Path]:
    home = Path(env.get("HOME") or Path.home())
    yield Path("/etc/pip.conf")
    yield home / ".pip" / "pip.conf"
    yield Path(env.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"
    if named := env.get("PIP_CONFIG_FILE"):
        yield Path(named)


def lay_out(folder: Path, *, at: str, wheels: Path | None, package: Path) -> list[tuple[str, str]]:
    """Make ``folder``, bound ``at`` that path in the build, with ``pip.conf`` and a subfolder per folder that it names.

    ``wheels`` is bound to its ``wheels``; ``package``, for the recipe's test, to its ``python``. Returns the binds as
    (source, target), ``folder`` itself first.
    """
    folder.mkdir(mode=0o700)
    binds = [(str(folder), at)]

    def seen(source: Path, name: str) -> str:
        (folder / name).mkdir(parents=True)
        binds.append((str(source), f"{at}/{name}"))
        return f"{at}/{name}"

    lines = ["[global]", "disable-pip-version-check = true", "root-user-action = ignore"]
    for key, values in settings().items():
        if key == "cert":
            shutil.copyfile(values[0], folder / "cert.pem")
            values = [f"{at}/cert.pem"]
        mapped = []
        for number, value in enumerate(values):
            local = Path(value.removeprefix("file://"))
            if key in _MANY and local.is_absolute() and local.is_dir():
                if key == "find-links":
                    value = seen(local, f"{key}{number}")
                else:  # an index may point to files in its parent folder
                    value = f"file://{seen(local.parent, f'{key}{number}')}/{local.name}"
            mapped.append(value)
        lines.append(f"{key} = " + "\n    ".join(mapped))
    seen(package, f"python/{package.name}")
    if wheels is not None:
        seen(wheels, "wheels")
    conf = folder / "pip.conf"
    conf.touch(mode=0o600)
    conf.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return binds
