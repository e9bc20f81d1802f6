"""Packs parts of the package into one file that any Python runs, for nodes that have no hpcjobs."""

from __future__ import annotations

import io
from pathlib import Path

import hpcjobs

_PACKAGE = Path(hpcjobs.__file__).parent


_SHARED = (
    "files.py",
    "gpu_errors.py",
    "processes/__init__.py",
    "processes/events.py",
    "processes/fork.py",
    "processes/start.py",
    "processes/tree.py",
    "record/__init__.py",
    "record/attempts.py",
    "record/control.py",
    "record/figures.py",
    "record/monitor.py",
    "record/names.py",
    "record/numbers.py",
    "record/state.py",
    "record/text.py",
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
