"""The files that a session brings to its node: code that needs only a Python, and extensions of Jupyter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hpcjobs.files import write_beside
from hpcjobs.node.session import files
from hpcjobs.node.session.files import Settings
from hpcjobs.pyz import pack

_INSIDE = Path(__file__).parent / "inside"


def bundle() -> bytes:
    """``session.pyz``: `hpcjobs.node.session` as a program in one file."""
    return pack("hpcjobs.node.session")


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
