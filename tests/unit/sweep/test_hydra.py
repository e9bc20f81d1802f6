"""Programs of Hydra: overrides of a sweep, and Hydra's own multirun through hpcjobs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from commandline import ok

TRAIN = """
import hydra
@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg):
    print("rate", cfg.lr, flush=True)
    if cfg.lr > 1:
        raise ValueError("too large")
    return cfg.lr
main()
"""


def test_parameters_reach_a_program_as_overrides(here: Path) -> None:
    (here / "train.py").write_text("")
    arguments = ("--set", "opt.lr=0.1", "--set", "name=a b", "--pass", "overrides", "train.py")
    (row,) = ok("sweep", "--site", "local", "--dry-run", "--json", *arguments).json
    assert row["command"].endswith("""train.py opt.lr=0.1 'name='"'"'a b'"'"''""")


def multirun(*overrides: str) -> subprocess.CompletedProcess[str]:
    launcher = ["hydra/launcher=hpcjobs", "hydra.launcher.site=local", "hydra.launcher.timeout_min=5"]
    arguments = ["-m", *launcher, *overrides]
    return subprocess.run([sys.executable, "train.py", *arguments], capture_output=True, text=True, timeout=400)


def test_a_multirun_of_hydra_is_a_sweep_whose_results_hydra_gets(here: Path) -> None:
    (here / "conf").mkdir()
    (here / "conf" / "config.yaml").write_text("lr: 0.1\n")
    (here / "train.py").write_text(TRAIN)
    done = multirun("lr=0.1,0.01")
    assert done.returncode == 0, done
    assert {path.read_text().split()[-1] for path in (here / "runs").rglob("logs/*_?.out")} == {"0.1", "0.01"}
    failed = multirun("lr=7")
    assert (failed.returncode, "too large" in failed.stderr) == (1, True), failed
