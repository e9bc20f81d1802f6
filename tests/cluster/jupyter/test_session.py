"""Jupyter on a worker node of a real Slurm, reached from a laptop by the commands that were printed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from commandline import hpcjobs
from laptop import Laptop

CELL = "import socket\nprint('this is', socket.gethostname())"


def notebook(folder: Path, *cells: str) -> Path:
    """A notebook that was never run."""
    path = folder / "hello.ipynb"
    made = [
        {"cell_type": "code", "id": f"cell{n}", "metadata": {}, "execution_count": None, "outputs": [], "source": text}
        for n, text in enumerate(cells)
    ]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": made}))
    return path


def start(site: str, *words: str) -> dict[str, Any]:
    """A session that answers, as ``--json`` tells of it."""
    answer = hpcjobs("jupyter", "--site", site, "--detach", "--json", *words, timeout_s=200)
    assert answer.code == 0, answer
    return answer.json


def command(told: dict[str, Any]) -> str:
    return shlex.join(told["tunnel"])


def test_a_cell_runs_on_the_worker_node_through_the_printed_tunnel(site: Any, desk: Laptop, workdir: Path) -> None:
    notebook(workdir, CELL)
    told = start(site(bind="address"))
    assert told["node"].startswith("tu")
    assert f":{told['node']}:" in command(told)
    screenshot = workdir / "page.png"
    with desk.tunnel(command(told)):
        seen = desk.browse(told["url"], notebook="hello.ipynb", screenshot=str(screenshot))
    assert seen["output"].strip() == f"this is {told['node']}"
    assert screenshot.stat().st_size > 10_000
