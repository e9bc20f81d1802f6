"""Wheels of what this environment has: a login host of the tests reaches no package index."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def write_wheels(folder: Path) -> None:
    """Pack what hpcjobs needs, as it is installed here, into wheels."""
    for package in _needed("hpcjobs", set()):
        _pack(package, folder)


def _needed(name: str, seen: set[str]) -> Iterator[Distribution]:
    for text in distribution(name).requires or ():
        requirement = Requirement(text)
        is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_needed and (canonical := canonicalize_name(requirement.name)) not in seen:
            seen.add(canonical)
            yield distribution(canonical)
            yield from _needed(canonical, seen)


def _pack(package: Distribution, folder: Path) -> None:
    tags = [
        line[5:]
        for line in (package.read_text("WHEEL") or "").splitlines()
        if line.startswith("Tag: ") and "py2-" not in line
    ]
    name = package.metadata["Name"].replace("-", "_")
    with zipfile.ZipFile(folder / f"{name}-{package.version}-{tags[0]}.whl", "w") as wheel:
        for file in package.files or ():
            path = Path(str(package.locate_file(file)))
            if ".." not in file.parts and path.suffix != ".pyc" and path.is_file():
                wheel.write(path, str(file))
