"""Which defects of this project's history the simulation finds: each ``*.patch`` is one, put back into today's code.

python tests/mutants/find.py                      all, with the default number of seeds
python tests/mutants/find.py --only array-requeue --seeds 5000

A patch names the function and the lines that it changes in it, and no file: it holds when a function moves.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SEEDS = 2000
SHARES = {"cases": 0.15, "jobs": 0.3, "federation": 0.05, "sweeps": 0.5}
"""Which part of the seeds are lives of which kind."""


class StaleError(Exception):
    """The lines that a patch changes are not in the code, or more than once."""


class Hunk(NamedTuple):
    """Lines of one function, and those that take their place."""

    function: str
    old: list[str]
    new: list[str]


def read_hunks(patch: Path) -> list[Hunk]:
    """The changes of a patch: ``@@ FUNCTION`` (or ``module``), then lines that begin with ``-``, ``+`` or a blank."""
    hunks = []
    for part in patch.read_text().split("\n@@ ")[1:]:
        function, *lines = part.rstrip("\n").split("\n")
        old = [line[1:] for line in lines if line[:1] != "+"]
        hunks.append(Hunk(function, old, [line[1:] for line in lines if line[:1] != "-"]))
    return hunks


def apply(hunk: Hunk, package: Path) -> Path:
    """Change the one function of ``package`` that has the lines; its file.

    Raises:
        StaleError: there is none, or there are several.
    """
    places = [
        (path, number)
        for path in sorted(package.rglob("*.py"))
        if hunk.old[0].strip() in (text := path.read_text())
        for number in _places(hunk, text)
    ]
    if len(places) != 1:
        raise StaleError(f"{hunk.function}: {len(places)} places have {hunk.old[0].strip()!r}")
    [(path, number)] = places
    lines = path.read_text().split("\n")
    indent = _indent([line for line in lines[number : number + len(hunk.old)] if line.strip()])
    new = textwrap.indent(_shift(hunk.new, _indent(hunk.old)), " " * indent).split("\n")
    lines[number : number + len(hunk.old)] = new
    path.write_text("\n".join(lines))
    ast.parse("\n".join(lines))
    return path


def _places(hunk: Hunk, text: str) -> Iterator[int]:
    """Numbers of the lines of ``text`` at which the lines of the hunk begin, within its function."""
    lines, count = text.split("\n"), len(hunk.old)
    expected = _shift(hunk.old, _indent(hunk.old))
    for first, last in _bodies(hunk.function, text, len(lines)):
        for number in range(first, last - count + 1):
            candidate = lines[number : number + count]
            if candidate[0].strip() == hunk.old[0].strip() and _shift(candidate, _indent(candidate)) == expected:
                yield number


def _bodies(function: str, text: str, length: int) -> Iterator[tuple[int, int]]:
    if function == "module":
        yield 0, length
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == function:
            yield node.lineno - 1, node.end_lineno or node.lineno


def _indent(lines: list[str]) -> int:
    return min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)


def _shift(lines: list[str], by: int) -> str:
    return "\n".join(line[by:].rstrip() for line in lines)


def copy_with(patch: Path, target: Path) -> None:
    """A checkout with the defect, in ``target``."""
    shutil.copytree(ROOT / "hpcjobs", target / "hpcjobs", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("templates", "site_configs", "containers", "tests"):
        (target / name).symlink_to(ROOT / name)
    for hunk in read_hunks(patch):
        apply(hunk, target / "hpcjobs")


def find(patch: Path, seeds: int) -> tuple[str, str]:
    """``found``, ``missed`` or ``stale``, and what was seen."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            copy_with(patch, Path(folder))
        except StaleError as error:
            return "stale", str(error)
        for lives, share in SHARES.items():
            if seen := play_to_first(lives, round(seeds * share), folder):
                return "found", seen
    return "missed", f"{seeds} seeds"


def play_to_first(lives: str, seeds: int, folder: str) -> str | None:
    """What the first seed that fails shows; None: none of them fails."""
    command = [sys.executable, "tests/simulation/simulate.py", "--lives", lives, "--seeds", f"0-{seeds - 1}"]
    env = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
    played = subprocess.run(
        [*command, "--first", "--jobs", "1"], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    lines = played.stdout.splitlines() or played.stderr.splitlines()[-1:]
    return None if seeds == 0 or played.returncode == 0 else f"{lives} {lines[0] if lines else 'do not start'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    patches = sorted(HERE.glob(f"{given.only}.patch"))
    began, counts = time.monotonic(), dict[str, int]()
    with ThreadPoolExecutor(given.jobs) as pool:
        for patch, (outcome, text) in zip(
            patches, pool.map(lambda patch: find(patch, given.seeds), patches), strict=True
        ):
            counts[outcome] = counts.get(outcome, 0) + 1
            print(f"{outcome:6}  {patch.stem:34}  {text}", flush=True)
    print(f"{counts} of {len(patches)} in {time.monotonic() - began:.0f} s")
    return bool(counts.get("stale"))


if __name__ == "__main__":
    sys.exit(main())
