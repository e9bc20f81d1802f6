"""What runs below the current folder have left, by the name of the job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def run_dir(name: str) -> Path:
    (path,) = Path("runs").glob(f"{name}-2*")
    return path


def log(name: str) -> str:
    return "".join(path.read_text(encoding="utf-8") for path in sorted((run_dir(name) / "logs").iterdir()))


def losses(name: str) -> list[float]:
    lines = map(json.loads, (run_dir(name) / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["loss"] for line in lines if line["kind"] == "step"]


def summary(name: str) -> dict[str, Any]:
    run_summary: dict[str, Any] = json.loads((run_dir(name) / "summary.json").read_text(encoding="utf-8"))
    return run_summary
