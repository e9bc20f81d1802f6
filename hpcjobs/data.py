"""Finds the files shipped with hpcjobs: in ``_data`` of a wheel, or at the root of a checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

_PACKAGE = Path(__file__).resolve().parent

Kind = Literal["templates", "site_configs", "containers", "docs"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def data_folder(kind: Kind) -> Path:
    """The folder of shipped ``kind``; a wheel carries it in ``hpcjobs/_data``."""
    packed = _PACKAGE / "_data" / kind
    return packed if packed.is_dir() else _PACKAGE.parent / kind
