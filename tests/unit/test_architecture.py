"""One direction of dependencies: who may import whom, read from the syntax trees, and what stays unloaded."""

from __future__ import annotations

import ast
import functools
import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from jinja2 import Environment, nodes

from hpcjobs.data import data_folder
from hpcjobs.job.models import Job
from hpcjobs.packing import pack
from hpcjobs.scheduler.base import connect
from hpcjobs.scheduler_kind import CLUSTER, KINDS
from hpcjobs.site.models import Site
from hpcjobs.slurm_commands import NAMES as COMMANDS
from hpcjobs.trainers import NAMES

PACKAGE = Path(__file__).resolve().parents[2] / "hpcjobs"

# room -> the rooms it may import from, besides itself; `hpcjobs` is the package's own public names.
GROUND = {"errors", "units", "files", "gpu_errors", "ports", "printable", "processes", "data", "packing"}
GROUND |= {"guards", "record", "scheduler_kind", "slurm_commands"}
ALLOWED = {
    "torch_state": set[str](),
    "trackers": set[str](),
    "errors": set[str](),
    "units": {"errors"},
    "data": set[str](),
    "guards": {"errors", "files"},
    "packing": {"data", "hpcjobs"},
    "files": set[str](),
    "gpu_errors": set[str](),
    "ports": set[str](),
    "printable": set[str](),
    "processes": {"errors", "slurm_commands"},
    "scheduler_kind": set[str](),
    "slurm_commands": set[str](),
    "record": {"files"},
    "node": {"files", "gpu_errors", "processes", "record", "scheduler_kind", "slurm_commands"},
    "runtime": {"files", "ports", "processes", "record", "slurm_commands", "torch_state", "trackers"},
    "trainers": {
        "files",
        "gpu_errors",
        "node",
        "ports",
        "record",
        "runtime",
        "scheduler_kind",
        "slurm_commands",
        "torch_state",
        "trackers",
    },
    "callbacks": {"record", "runtime"},
    "fabric": {"files", "gpu_errors", "processes", "record", "runtime", "slurm_commands"},
    "site": GROUND,
    "containers": GROUND | {"site", "hpcjobs"},
    "job": GROUND | {"site", "containers", "runtime", "fabric", "trainers", "hpcjobs"},
    "scheduler": GROUND | {"site", "job", "runtime", "hpcjobs"},
    "run": GROUND | {"site", "job", "scheduler", "runtime", "fabric", "hpcjobs"},
    "pages": {"files", "hpcjobs"},
    "jobstats": GROUND | {"site", "job", "scheduler", "run", "pages", "runtime", "hpcjobs"},
    "sweeps": GROUND | {"site", "job", "scheduler", "run", "pages", "hpcjobs"},
    "scaling": GROUND | {"site", "job", "scheduler", "run", "sweeps", "jobstats", "pages", "runtime", "hpcjobs"},
    "jupyter": GROUND | {"site", "containers", "job", "scheduler", "run", "node", "remote", "hpcjobs"},
    "diagnosis": GROUND | {"site", "job", "scheduler", "run", "runtime", "hpcjobs"},
    "top": GROUND | {"site", "job", "scheduler", "run", "diagnosis", "hpcjobs"},
    "discovery": GROUND | {"site", "job", "scheduler", "run", "runtime", "hpcjobs"},
    "sandbox": GROUND | {"site", "runtime", "hpcjobs"},
    "remote": GROUND | {"site", "run", "sweeps", "hpcjobs"},
    "cloud": GROUND | {"site", "sandbox", "hpcjobs"},
    "cli": GROUND
    | {
        "site",
        "containers",
        "fabric",
        "job",
        "node",
        "runtime",
        "scheduler",
        "run",
        "jobstats",
        "scaling",
        "sweeps",
        "sandbox",
        "diagnosis",
        "discovery",
        "cloud",
        "jupyter",
        "top",
        "trainers",
        "pages",
        "remote",
        "hpcjobs",
    },
    "hpcjobs": {"site", "job", "jobstats", "run", "scaling", "sweeps"},
    "__main__": {"cli"},
}
# part of the trainers, a module or a package -> the parts that it may import from, besides itself
BASE = {"config", "distributed", "workloads"}
TRAINERS = {
    "config": set[str](),
    "launch": {"config"},
    "distributed": set[str](),
    "workloads": {"config"},
    "data": BASE | {"optimization"},
    "weights": BASE | {"strategies"},
    "optimization": BASE | {"weights", "strategies"},
    "checkpoint": BASE | {"weights", "optimization"},
    "metrics": BASE | {"optimization"},
    "profiler": BASE | {"optimization", "checkpoint"},
    "measure": {"launch", "distributed", "strategies"},
    "loop": BASE | {"launch", "data", "strategies", "optimization", "checkpoint", "metrics", "profiler"},
}
STDLIB_ONLY = {
    "files",
    "gpu_errors",
    "ports",
    "scheduler_kind",
    "slurm_commands",
    "node",
    "record",
    "runtime",
    "processes",
    "fabric",
}
SUPERVISOR = "hpcjobs.scheduler.local.supervisor"
SUBMIT_SIDE = ["jinja2", "msgspec", "rich", "submitit", "typer", "yaml"]


def room(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "hpcjobs" if first == "__init__" else first


@functools.cache
def modules() -> tuple[Path, ...]:
    return tuple(sorted(PACKAGE.rglob("*.py")))


@functools.cache
def syntax_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path) -> Iterator[str]:
    """Dotted names of what a module imports, wherever in it the import stands."""
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_imported(path: Path) -> set[str]:
    names = [name.split(".") for name in imported(path) if name.split(".")[0] == "hpcjobs"]
    return {parts[1] if len(parts) > 1 and parts[1] in ALLOWED else "hpcjobs" for parts in names}


def test_every_room_has_its_place_in_the_table() -> None:
    assert {room(path) for path in modules()} == set(ALLOWED)


def test_no_module_imports_against_the_direction() -> None:
    wrong = {
        f"{path.relative_to(PACKAGE)} imports {other}"
        for path in modules()
        for other in rooms_imported(path) - ALLOWED[room(path)] - {room(path)}
    }
    assert not wrong


def test_the_parts_of_the_trainers_import_in_one_direction() -> None:
    paths = {
        path: path.relative_to(PACKAGE / "trainers").parts[0].removesuffix(".py")
        for path in modules()
        if room(path) == "trainers"
    }
    wrong = {
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path, part in paths.items()
        for name in imported(path)
        if part in TRAINERS
        and name.startswith("hpcjobs.trainers.")
        and name.split(".")[2] not in {*TRAINERS[part], part}
    }
    assert not wrong
    assert set(paths.values()) == {*TRAINERS, *NAMES, "__init__", "strategies"}


def test_the_node_side_imports_nothing_but_the_standard_library() -> None:
    wrong = {
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in modules()
        if room(path) in STDLIB_ONLY
        for name in imported(path)
        if name.split(".")[0] not in {*sys.stdlib_module_names, "hpcjobs"}
    }
    assert not wrong


STARTS_PROGRAMS = {
    *(f"subprocess.{name}" for name in ("Popen", "run", "call", "check_call", "check_output", "getoutput")),
    *("os.system", "os.popen", "os.fork", "os.forkpty", "os.startfile", "pty.fork", "pty.spawn"),
    *("asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell"),
    *(f"os.{verb}{form}" for verb in ("exec", "spawn") for form in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
    *("os.posix_spawn", "os.posix_spawnp"),
}
ALONE = {"containers/probe.py"}  # runs in an image by itself, where there is no hpcjobs


def calls(path: Path) -> Iterator[str]:
    """Dotted names of the functions that a module calls, by the names they have where they are defined."""
    tree = syntax_tree(path)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            first, dot, rest = ast.unparse(node.func).partition(".")
            yield names.get(first, first) + dot + rest


@pytest.mark.parametrize(
    ("program", "minor"), [("node", 6), ("node.monitor", 6), ("node.figures", 6), ("node.session", 9)]
)
def test_what_is_packed_for_nodes_has_the_syntax_of_their_oldest_python(program: str, minor: int) -> None:
    """Few machines have so old a Python, which refuses the complete file for one line."""
    with zipfile.ZipFile(io.BytesIO(pack(f"hpcjobs.{program}"))) as packed:
        for name in packed.namelist():
            text = packed.read(name).decode()
            ast.parse(text, name, feature_version=(3, minor))
            assert minor > 6 or "from __future__ import annotations" not in text, f"{name}: that is of Python 3.7"


def test_programs_are_started_in_one_package() -> None:
    started = {
        f"{name} calls {function}"
        for path in modules()
        if room(path) != "processes" and (name := str(path.relative_to(PACKAGE))) not in ALONE
        for function in calls(path)
        if function in STARTS_PROGRAMS
    }
    assert not started, "call hpcjobs.processes instead"


def spelled_commands(path: Path) -> Iterator[str]:
    """Slurm's commands that a list or a call spells: one of its programs, and then an option or a word of scontrol."""
    for node in ast.walk(syntax_tree(path)):
        elements = (
            node.elts if isinstance(node, ast.List | ast.Tuple) else node.args if isinstance(node, ast.Call) else []
        )
        first, rest = (getattr(elements[0], "value", None), elements[1:]) if elements else (None, [])
        if first not in COMMANDS or not rest:
            continue
        texts = [element.value if isinstance(element, ast.Constant) else None for element in rest]
        is_list = not isinstance(node, ast.Call)
        if first in ("scontrol", "sacctmgr") or any(
            is_list if text is None else str(text).startswith("-") for text in texts
        ):
            yield f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"


def test_one_module_spells_the_commands_of_slurm() -> None:
    spelled = [line for path in modules() if path.stem != "slurm_commands" for line in spelled_commands(path)]
    assert not spelled, "a function of hpcjobs.slurm_commands gives the command"


def compared_kinds(path: Path) -> Iterator[str]:
    """Comparisons with the name of a kind of scheduler."""
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.Compare):
            names = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)} & {*KINDS}
            text = ast.unparse(node)
            if names and (names != {"local"} or "scheduler" in text.lower() or "kind" in text):
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}: {text}"


@pytest.mark.parametrize("kind", [Site, Job])
def test_sites_and_jobs_may_name_every_kind_of_scheduler(kind: type[Site | Job]) -> None:
    assert get_args(get_type_hints(kind)["scheduler"]) == tuple(KINDS)


def test_every_kind_of_scheduler_has_its_client() -> None:
    assert len({type(connect(kind)) for kind in KINDS}) == len(KINDS)


def test_only_schedulers_and_sites_name_a_kind_of_scheduler() -> None:
    rooms = [path for path in modules() if room(path) not in ("scheduler", "scheduler_kind", "site")]
    compared = [line for path in rooms for line in compared_kinds(path)]
    named = [
        f"{name}:{node.lineno}: {node.value!r}"
        for path in rooms
        if (name := str(path.relative_to(PACKAGE))) != "cloud/section.py"  # a user of this name
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.Constant) and node.value == CLUSTER
    ]
    assert not compared + named, "ask for a capability: SchedulerKind of hpcjobs.scheduler_kind"


def test_no_template_names_a_kind_of_scheduler() -> None:
    folder = data_folder("templates")
    trees = {path: Environment(autoescape=True).parse(path.read_text()) for path in sorted(folder.rglob("*.j2"))}
    assert folder / "job.sh.j2" in trees
    named = {
        f"{path.relative_to(folder)}:{node.lineno}: {node.value!r}"
        for path, tree in trees.items()
        for node in tree.find_all(nodes.Const)
        if node.value in KINDS
    }
    assert not named, "ask for a capability: job.kind"


def test_nobody_outside_trainers_and_callbacks_imports_torch_but_for_states_that_hold_tensors() -> None:
    heavy = {"torch", "horovod", "lightning", "mlxtend", "transformers"}
    users = {room(path) for path in modules() if heavy & {name.split(".")[0] for name in imported(path)}}
    assert users <= {"trainers", "callbacks", "torch_state"}


def python(code: str) -> str:
    """What ``code`` prints in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def blocking(names: list[str]) -> str:
    return f"import sys\nfor name in {names}: sys.modules[name] = None\n"


NODE_SIDE = [
    f"hpcjobs.{package}.{path.stem}"
    for package in ("runtime", "processes")
    for path in sorted((PACKAGE / package).glob("*.py"))
    if path.stem != "__init__"
]


@pytest.mark.parametrize("module", [*NODE_SIDE, SUPERVISOR])
def test_the_node_side_imports_without_any_other_package(module: str) -> None:
    python(blocking([*SUBMIT_SIDE, "torch", "numpy"]) + f"import {module}")


def test_a_trainers_config_imports_without_the_submit_side() -> None:
    python(blocking(SUBMIT_SIDE) + "import hpcjobs.trainers.config")


def test_the_help_page_loads_nothing_heavy() -> None:
    heavy = ["torch", "pandas", "numpy", "submitit", "jinja2", "msgspec", "yaml", "rich", "pydantic"]
    loaded = python(
        "import sys; sys.argv = ['hpcjobs', '--help']\n"
        "from hpcjobs.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        f"print('loaded:', [name for name in {heavy} if name in sys.modules])"
    )
    assert "submit" in loaded
    assert loaded.splitlines()[-1] == "loaded: []"


def test_what_lists_jobs_loads_nothing_that_makes_them() -> None:
    makes = ["jinja2", "hpcjobs.job.resolve", "hpcjobs.job.launch", "hpcjobs.job.environment"]
    code = "import sys, hpcjobs.cli.jobs, hpcjobs.scheduler.slurm.client, hpcjobs.scheduler.local.queue\n"
    assert python(code + f"print([name for name in {makes} if name in sys.modules])") == "[]\n"


def test_what_starts_the_ranks_of_a_machine_loads_nothing_slow() -> None:
    slow = ["asyncio", "json", "pathlib", "re", "subprocess", "typing"]
    code = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); import hpcjobs.runtime.spawn\n"
    code += f"print([name for name in {slow} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-SEc", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_importing_the_package_imports_nothing_of_it() -> None:
    loaded = python("import sys, hpcjobs; print([name for name in sys.modules if name.startswith('hpcjobs.')])")
    assert loaded.strip() == "[]"
