"""What a session brings along to its node: code that needs nothing but a Python, and what runs in Jupyter itself."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import hpcjobs
from hpcjobs.files import write_beside
from hpcjobs.runtime.session import files
from hpcjobs.runtime.session.files import Settings

_PACKAGE = Path(hpcjobs.__file__).parent
_INSIDE = Path(__file__).parent / "inside"


def bundle() -> bytes:
    """``session.pyz``: `hpcjobs.runtime.session` as a program in one file."""
    package = _PACKAGE / "runtime" / "session"
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("__main__.py", (package / "__main__.py").read_text(encoding="utf-8"))
        for name in ("hpcjobs/__init__.py", "hpcjobs/runtime/__init__.py"):
            archive.writestr(name, "")
        for path in sorted(package.glob("*.py")):
            archive.writestr(f"hpcjobs/runtime/session/{path.name}", path.read_text(encoding="utf-8"))
    return content.getvalue()


def fill(run_dir: Path, settings: Settings) -> None:
    """Put everything that the session's node reads into its run folder."""
    import msgspec

    write_beside(run_dir / files.SETTINGS, msgspec.json.encode(settings._asdict()))
    write_beside(run_dir / files.BUNDLE, bundle())
    for source in _inside():
        place = run_dir / files.FOLDER / source.relative_to(_INSIDE)
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_beside(place, source.read_bytes())


def _inside() -> Iterator[Path]:
    return (path for path in sorted(_INSIDE.rglob("*")) if path.suffix in (".py", ".js", ".json"))
