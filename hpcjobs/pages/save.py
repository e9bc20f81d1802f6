"""Writes pages and tables; an error names the file, also if the disk fills up during the write."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from hpcjobs.files import naming_errors

if TYPE_CHECKING:
    import polars as pl


def save_text(path: Path, text: str) -> None:
    """Write a page."""
    with naming_errors(path):
        path.write_text(text, encoding="utf-8")


def save_csv(path: Path, frame: pl.DataFrame) -> None:
    """Write a table as CSV."""
    save_text(path, frame.write_csv())


def save_parquet(path: Path, frame: pl.DataFrame) -> None:
    """Write a table as Parquet, through a buffer: errors of polars have neither an error number nor a file name."""
    buffer = io.BytesIO()
    frame.write_parquet(buffer)
    with naming_errors(path):
        path.write_bytes(buffer.getvalue())
