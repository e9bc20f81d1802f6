"""Packs the running hpcjobs as a wheel: rented clusters and login hosts install it, not an index's package."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

import hpcjobs
from hpcjobs import __version__
from hpcjobs.data import KINDS, data_folder

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
    package = Path(hpcjobs.__file__).parent
    for path in _visible(package):
        if path.relative_to(package).parts[0] != "_data":
            yield f"hpcjobs/{path.relative_to(package).as_posix()}", path.read_bytes()
    for kind in KINDS:
        folder = data_folder(kind)
        for path in _visible(folder):
            yield f"hpcjobs/_data/{kind}/{path.relative_to(folder).as_posix()}", path.read_bytes()
    plugin = package.parent / "hydra_plugins/hpcjobs_launcher.py"  # plugins of others may be in the same folder
    yield "hydra_plugins/hpcjobs_launcher.py", plugin.read_bytes()
    installed = distribution("hpcjobs")
    for name in ("METADATA", "entry_points.txt"):
        yield f"{_INFO}/{name}", (installed.read_text(name) or "").encode()
    yield f"{_INFO}/WHEEL", _WHEEL.encode()


def _visible(folder: Path) -> Iterator[Path]:
    """Files of ``folder``, without caches, images that are built into ``containers/``, and pictures of ``docs/``."""
    for path in folder.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".pyc", ".sif", ".png", ".svg"):
            yield path


def _urlsafe_digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
