"""Packs the running hpcjobs: parts of it as a file for a node's Python, all of it as a wheel for other machines."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import hpcjobs
from hpcjobs import __version__
from hpcjobs.data import KINDS, data_folder

_PACKAGE = Path(hpcjobs.__file__).parent


_SHARED = (
    "files.py",
    "gpu_errors.py",
    "processes/__init__.py",
    "processes/fork.py",
    "processes/start.py",
    "processes/tree.py",
    "record/__init__.py",
    "record/control.py",
    "record/figures.py",
    "record/monitor.py",
    "record/state.py",
    "record/values.py",
    "scheduler_kind.py",
    "slurm_commands.py",
)
"""Modules of hpcjobs that every packed program may import from outside its package."""


def pack(name: str) -> bytes:
    """A zip file that Python runs: a package with its ``__main__``, or a module with its ``main``."""
    parts = name.split(".")
    place = _PACKAGE.joinpath(*parts[1:])
    if place.is_dir():
        paths, program = sorted(place.glob("*.py")), (place / "__main__.py").read_text(encoding="utf-8")
    else:
        paths, program = [place.with_suffix(".py")], f"import sys\nfrom {name} import main\nsys.exit(main())\n"
    content = io.BytesIO()
    import zipfile  # every submission imports this module, and few pack a program

    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("__main__.py", program)
        for depth in range(1, len(parts)):
            archive.writestr("/".join([*parts[:depth], "__init__.py"]), "")
        for path in [*paths, *(_PACKAGE / shared for shared in _SHARED)]:
            archive.writestr(f"hpcjobs/{path.relative_to(_PACKAGE)}", path.read_text(encoding="utf-8"))
    return content.getvalue()


_EPOCH = (1980, 1, 1, 0, 0, 0)
_INFO = f"hpcjobs-{__version__}.dist-info"
_WHEEL = "Wheel-Version: 1.0\nGenerator: hpcjobs\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


class Wheel(NamedTuple):
    """A wheel, in memory."""

    name: str
    content: bytes
    sha256: str


def build_wheel() -> Wheel:
    """Pack the running package, its shipped data and its metadata; the same files give the same bytes.

    An installed package and an editable checkout give the same wheel, with the layout of the project's build.
    """
    import zipfile

    files = dict(sorted(_files()))
    record = f"{_INFO}/RECORD"
    lines = [f"{name},sha256={_urlsafe_digest(content)},{len(content)}" for name, content in files.items()]
    files[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name, _EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (0o755 if content.startswith(b"#!") else 0o644) << 16
            archive.writestr(info, content)
    content = packed.getvalue()
    return Wheel(f"hpcjobs-{__version__}-py3-none-any.whl", content, hashlib.sha256(content).hexdigest())


def digest_package() -> str:
    """SHA-256 of the files that `build_wheel` packs, without packing them."""
    digest = hashlib.sha256()
    for name, content in sorted(_files()):
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _files() -> Iterator[tuple[str, bytes]]:
    """Path inside the wheel -> content of everything but RECORD."""
    from importlib import metadata

    for path in _visible(_PACKAGE):
        if path.relative_to(_PACKAGE).parts[0] != "_data":
            yield f"hpcjobs/{path.relative_to(_PACKAGE).as_posix()}", path.read_bytes()
    for kind in KINDS:
        folder = data_folder(kind)
        for path in _visible(folder):
            yield f"hpcjobs/_data/{kind}/{path.relative_to(folder).as_posix()}", path.read_bytes()
    plugin = _PACKAGE.parent / "hydra_plugins/hpcjobs_launcher.py"  # plugins of others may be in the same folder
    yield "hydra_plugins/hpcjobs_launcher.py", plugin.read_bytes()
    installed = metadata.distribution("hpcjobs")
    for name in ("METADATA", "entry_points.txt"):
        yield f"{_INFO}/{name}", (installed.read_text(name) or "").encode()
    yield f"{_INFO}/WHEEL", _WHEEL.encode()


def _visible(folder: Path) -> Iterator[Path]:
    """Files of ``folder``, without caches, images that are built into ``containers/``, and pictures of ``docs/``."""
    for path in folder.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".pyc", ".sif", ".png", ".svg"):
            yield path


def _urlsafe_digest(content: bytes) -> str:
    import base64

    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
