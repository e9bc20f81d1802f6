"""Scripts as the unit tests of jobs use them: planned, compared with recorded ones, checked, and run here.

Run with hostile words, and with stubs in the place of what only a cluster has.
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

import hpcjobs
from hpcjobs.data import data_folder
from hpcjobs.job.environment import shell_files
from hpcjobs.job.models import Plan
from hpcjobs.packing import pack

GOLDEN = Path(__file__).resolve().parents[2] / "data" / "golden"

ARGUMENTS = [
    "two words", "", "it's", '"so"', "$(touch x)", "`touch x`", "back\\slash", "new\nline", "a,b", "100%j", "{{ job }}",
    "TASK", "--", "नमस्ते", "$$ ${local_rank} $local_rank",
]  # fmt: skip
TELL = """
import json, os, pathlib, sys
names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "WORD")
told = {"argv": sys.argv[1:], "cwd": os.getcwd(), **{name: os.environ[name] for name in names}}
(pathlib.Path(os.environ["HPCJOBS_RUN_DIR"]) / f"rank{os.environ['RANK']}.json").write_text(json.dumps(told))
sys.exit(int(os.environ.get("FAIL", "0")) if os.environ["RANK"] == "1" else 0)
"""

# Each stands for a program of a cluster, and starts the tasks here.
SRUN = """#!/usr/bin/env python3
import os, subprocess, sys
options, words = {}, sys.argv[1:]
while words and words[0].startswith("--"):
    name, _, value = words.pop(0)[2:].partition("=")
    options[name] = value
ntasks, nodes = int(options["ntasks"]), int(options["nodes"])
per_node = int(options["ntasks-per-node"])
assert ntasks == nodes * per_node
env = lambda n: {**os.environ, "SLURM_PROCID": str(n), "SLURM_LOCALID": str(n % per_node),
                 "SLURM_NODEID": str(n // per_node), "SLURM_NTASKS": str(ntasks)}
tasks = [subprocess.Popen(words, env=env(n)) for n in range(ntasks)]
sys.exit(max(task.wait() for task in tasks))
"""
AGENT = """#!/usr/bin/env python3
import os, string, subprocess, sys
options = dict(word[2:].partition("=")[::2] for word in sys.argv[1:] if word.startswith("--") and "=" in word)
program, *words = sys.argv[sys.argv.index("--no-python") + 1:]
node, count, nodes = int(os.environ.get("SLURM_NODEID", "0")), int(options["nproc-per-node"]), int(options["nnodes"])
env = lambda n: {**os.environ, "RANK": str(node * count + n), "LOCAL_RANK": str(n), "GROUP_RANK": str(node),
                 "WORLD_SIZE": str(nodes * count), "LOCAL_WORLD_SIZE": str(count)}
fill_in = lambda n: [string.Template(word).safe_substitute(local_rank=n) for word in words]  # as torch does
tasks = [subprocess.Popen([program, *fill_in(n)], env=env(n)) for n in range(count)]
sys.exit(max(task.wait() for task in tasks))
"""
_PYTHON = f"#!{os.path.realpath(sys.executable)} -IS"
STUBS = {
    "srun": SRUN.replace("#!/usr/bin/env python3", _PYTHON),
    "agent": AGENT.replace("#!/usr/bin/env python3", _PYTHON),
    "scontrol": """#!/bin/sh
case "$*" in
    *"show job"*) echo "JobId=7 JobState=RUNNING Reason=None Restarts=0" ;;
    *) printf 'node1\\nnode2\\n' ;;
esac
""",
    "module": "#!/bin/sh\n",
    "conda": "#!/bin/sh\necho 'conda() { :; }'\n",
}


def run_here(plan: Plan, tmp_path: Path, *, files: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the plan's script with stubs in the place of a cluster's programs and folders.

    ``files``: its run folder has the shell files, as hpcjobs submit makes it.
    """
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name, text in STUBS.items():
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    (stubs / "bin").mkdir()
    (stubs / "bin" / "activate").touch()
    (stubs / "python").symlink_to(sys.executable)
    script = re.sub(r"\S+ -c '[^']+' torch\.distributed\.run", "agent", plan.script)
    script = re.sub(r"(?<=[' ])/\S*/hpcjobs/venv", str(stubs), script)
    run_dir = tmp_path / "run folder"
    (run_dir / "shell").mkdir(parents=True, exist_ok=True)
    for name, text in (shell_files(script) if files else {}).items():
        (run_dir / "shell" / name).write_text(text)
    script = re.sub(f"'?{re.escape(str(plan.run_dir))}([^ '\"#\n]*)'?", rf"'{run_dir}\1'", script)
    (tmp_path / "job.sh").write_text(script)
    if plan.job.retries is not None:
        (run_dir / "node.pyz").write_bytes(pack("hpcjobs.node"))
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": str(plan.job.nodes), "SLURM_JOB_NODELIST": "node[1-2]"}
    return subprocess.run(
        ["bash", str(tmp_path / "job.sh")],
        env={**os.environ, "PATH": f"{stubs}:{os.environ['PATH']}", "HPCJOBS_JOB_ID": "L7", **slurm, **env},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )


def planned(site: str, launcher: str, *program: str, **options: object) -> Plan:
    where = replace(hpcjobs.load_site(site), node_local=())  # a test's folder is in /tmp
    nodes = 2 if where.scheduler == "slurm" else 1
    layout: dict[str, object] = {"nodes": nodes, "ntasks_per_node": 2, "launcher": launcher, **options}
    return hpcjobs.plan(program, site=where, made_by="hpcjobs submit ...", **layout)  # type: ignore[arg-type]


IN_FULL = "tu-hpc-srun"
"""The script that is recorded in full; of each other one the difference to another script is."""


def as_recorded(plan: Plan, name: str, base: Plan) -> None:
    """The plan's script is the recorded one, in its difference to that of ``base``.

    With GOLDEN=write it is recorded anew: read the difference.
    """
    script = _without_places(plan)
    text = script if name == IN_FULL else difference(_without_places(base), script)
    recorded = GOLDEN / (f"{name}.sh" if name == IN_FULL else f"{name}.diff")
    if os.environ.get("GOLDEN") == "write":
        recorded.parent.mkdir(exist_ok=True)
        recorded.write_text(text)
    assert text == recorded.read_text()


def _without_places(plan: Plan) -> str:
    script = plan.script
    for path, stands in (
        (str(plan.run_dir), "/RUN"),
        (str(Path.cwd()), "/HERE"),
        (sys.executable, "/PYTHON"),
        (str(Path(hpcjobs.__file__).parent), "/PACKAGE"),
        (str(data_folder("templates").parent), "/SHIPPED"),
        (f"hpcjobs {hpcjobs.__version__}", "hpcjobs VERSION"),
    ):
        script = script.replace(path, stands)
    return script.replace("/PYTHON -P -m", "/PYTHON -m")  # which Python 3.10 does not have


def difference(base: str, script: str) -> str:
    """The lines that ``script`` alone has (+), and those that ``base`` alone has (-)."""
    lines = list(difflib.unified_diff(base.splitlines(), script.splitlines(), lineterm="", n=0))
    return "\n".join("@@" if line.startswith("@@ ") else line for line in lines[2:]) + "\n"


def without_complaint(scripts: Sequence[str], folder: Path) -> None:
    """Neither bash nor shellcheck has one."""
    paths = [folder / f"{number}.sh" for number in range(len(scripts))]
    for path, script in zip(paths, scripts, strict=True):
        path.write_text(script)
        subprocess.run(["bash", "-n", path], check=True)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, "--norc", *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
