"""Which defects of this project's history the simulation finds: each ``*.patch`` is one, put back into today's code.

python tests/mutants/find.py                      all, with the default number of seeds
python tests/mutants/find.py --only array-requeue --seeds 5000
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SEEDS = 1000


def copy_with(patch: Path, target: Path) -> str | None:
    """A checkout with the defect in ``target``; the message of `patch` where it does not apply any more."""
    shutil.copytree(ROOT / "hpcjobs", target / "hpcjobs", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("templates", "site_configs", "containers", "tests"):
        (target / name).symlink_to(ROOT / name)
    applied = subprocess.run(
        ["patch", "--strip=1", "--batch", f"--input={patch}"], cwd=target, capture_output=True, text=True, check=False
    )
    return None if applied.returncode == 0 else applied.stdout


def find(patch: Path, seeds: int) -> tuple[str, str]:
    """``found``, ``missed`` or ``stale``, and what was seen."""
    with tempfile.TemporaryDirectory() as folder:
        if (refusal := copy_with(patch, Path(folder))) is not None:
            return "stale", refusal.strip().splitlines()[-1]
        simulate = [
            sys.executable,
            "tests/simulation/simulate.py",
            "--seeds",
            f"0-{seeds - 1}",
            "--first",
            "--jobs",
            "1",
        ]
        env = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        played = subprocess.run(simulate, cwd=folder, env=env, capture_output=True, text=True, check=False)
    lines = played.stdout.splitlines() or played.stderr.splitlines()[-1:]
    if played.returncode == 0:
        return "missed", f"{seeds} seeds"
    return "found", lines[0] if lines else "it does not start"


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
