"""What README and docs/ tell a reader to type works, and prints what they show."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from pages import PAGES, REPOSITORY, Block, Command, Where, blocks, indented_commands, tabled_submissions

from hpcjobs import sandbox
from hpcjobs.sandbox.packages import PACKAGES, apt_line, is_debian, missing_packages
from hpcjobs.site.library import load_site

SHARED = Path("/var/lib/hpcjobs-tests")  # the hosts of a sandbox all see it; /tmp is each one's own
ENDED = "documented command ended:"
FOREIGN = ("SLURM_", "SBATCH_", "SRUN_", "HPCJOBS_", "XDG_", "MAKE", "MFLAGS")


def _names(pages: Sequence[Path]) -> list[str]:
    return [str(page.relative_to(REPOSITORY)) for page in pages]


def _pages_with(where: Where) -> list[Path]:
    return [page for page in PAGES if any(block.where == where for block in blocks(page))]


@pytest.mark.parametrize("page", PAGES, ids=_names(PAGES))
def test_every_command_says_where_it_runs(page: Path) -> None:
    """No block of commands is left out of the tests unsaid."""
    assert [f"{page}:{block.line}" for block in blocks(page) if block.where is None] == []
    assert indented_commands(page) == []


@pytest.mark.parametrize("command", tabled_submissions(REPOSITORY / "README.md"))
def test_a_command_in_a_table_makes_its_script(command: str) -> None:
    """A site on the other side of the world: what would be sent is as far as a test can go here."""
    told = command.replace("hpcjobs submit", "hpcjobs submit --dry-run", 1)
    env = {**os.environ, "USER": "you", "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", told], cwd="/", env=env, capture_output=True, text=True)  # writes nothing
    assert done.returncode == 0, done.stderr
    assert re.search(r"hpcjobs\.(trainers|fabric)\.", done.stdout)


def test_the_site_file_shown_is_one(tmp_path: Path) -> None:
    """A reader who copies it can submit to it."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```yaml\n# (\S+\.yaml)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert shown
    for name, content in shown:
        (tmp_path / name).write_text(content, encoding="utf-8")
        assert load_site(str(tmp_path / name)).default_partition == "cpu"


def test_the_packages_of_a_sandbox_are_those_it_asks_for() -> None:
    """The line that installs them, as `hpcjobs sandbox up` would say it."""
    shown = (REPOSITORY / "docs" / "sandbox.md").read_text(encoding="utf-8")
    assert f" {apt_line(list(PACKAGES))} " in " ".join(shown.replace("\\\n", " ").split())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", _pages_with("run"), ids=_names(_pages_with("run")))
def test_commands_for_any_machine_work_as_shown(page: Path, tmp_path: Path) -> None:
    """From a folder like a fresh checkout, by anybody."""
    _work_through(page, "run", _checkout(tmp_path / "hpcjobs"))


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that all hosts of a sandbox see, with no sandbox before or after; skipped where there can be none."""
    if os.geteuid() != 0:
        pytest.skip("a sandbox needs root")
    if not is_debian() or missing_packages():
        pytest.skip(f"a sandbox needs Debian or Ubuntu with {' '.join(missing_packages())}")
    if sandbox.status().state == "up":
        pytest.skip("a sandbox is up; it is left alone")
    SHARED.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=SHARED))
    yield folder
    sandbox.down()
    shutil.rmtree(folder)
    if not any(SHARED.iterdir()):
        SHARED.rmdir()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", _pages_with("run: sandbox"), ids=_names(_pages_with("run: sandbox")))
def test_commands_for_a_sandbox_work_as_shown(page: Path, shared_folder: Path) -> None:
    """On a real Slurm, which the page itself brings up and takes down."""
    _work_through(page, "run: sandbox", _checkout(shared_folder / "hpcjobs"))


def _checkout(folder: Path) -> Path:
    """A folder with everything of the checkout in its root, by links, and a place for what the commands write."""
    folder.mkdir()
    for entry in REPOSITORY.iterdir():
        if entry.name not in {"runs", ".git"}:
            (folder / entry.name).symlink_to(entry)
    if not (folder / ".venv").exists():
        (folder / ".venv").symlink_to(sys.prefix)
    return folder


def _work_through(page: Path, where: Where, folder: Path) -> None:
    steps = [(block, command) for block in blocks(page) if block.where == where for command in block.commands]
    answers = _type(folder, [command.text for _, command in steps])
    assert len(answers) == len(steps), f"{page}: the shell ended at: {steps[len(answers)][1].text}"
    for number, ((block, command), (code, output)) in enumerate(zip(steps, answers, strict=True)):
        place = f"{page}:{block.line}: {command.text}"
        if not _tells_its_code(block, command):
            assert code == 0, f"{place}\nended with {code}:\n{output}"
        if command.shown is not None:
            difference = _difference(command, _as_shown(output, folder))
            assert difference is None, f"step {number}, {place}\n{difference}"


def _tells_its_code(block: Block, command: Command) -> bool:
    """A command that may fail is followed by one that shows its exit code."""
    after = block.commands[block.commands.index(command) + 1 :]
    return bool(after) and after[0].text == "echo $?"


def _type(folder: Path, commands: Sequence[str]) -> list[tuple[int, str]]:
    """Exit code and output (both kinds, as on a terminal) of each command, typed into one shell."""
    script = "".join(f"{text}\ncode=$?; echo; echo {ENDED} $code; (exit $code)\n" for text in commands)
    env = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    env |= {
        "USER": "you",
        "HOME": str(folder.parent),
        "COLUMNS": "400",
        "PATH": f"{folder}/.venv/bin:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=env, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8",
    )  # fmt: skip
    parts = re.split(rf"\n{ENDED} (\d+)\n", done.stdout)
    return [(int(code), output) for output, code in zip(parts[0::2], parts[1::2], strict=False)]


def _as_shown(output: str, folder: Path) -> list[str]:
    """Output with this machine's names replaced by those that the pages use."""
    for here in (folder, REPOSITORY):
        output = output.replace(str(here), "/home/you/hpcjobs")
    output = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "laptop", output)
    return [line.rstrip() for line in output.splitlines() if line.strip()]


def _difference(command: Command, actual: list[str]) -> str | None:
    """Why ``actual`` is not what the page shows, if so.

    Numbers match numbers, runs of blanks each other; ``...`` matches the rest of a line, or alone any lines.
    """
    level = str if command.text == "echo $?" else _levelled
    shown = [line.rstrip() for line in command.shown or () if line.strip()]
    pattern = "".join(r"(?:.*\n)*?" if line == "..." else f"{_wild(level(line))}\n" for line in shown)
    if re.fullmatch(pattern, "".join(f"{level(line)}\n" for line in actual)):
        return None
    return "the page shows:\n{}\nbut this came out:\n{}".format("\n".join(shown), "\n".join(actual))


def _levelled(line: str) -> str:
    """The line with all that differs from run to run made the same."""
    line = re.sub(r"\d{8}-\d{6}-[0-9a-f]{4,8}\b", "0", line)
    line = re.sub(r"\d+(\.\d+)?(e[+-]\d+)?", "0", line)
    return re.sub(r"─+", "─", re.sub(r"\s+", " ", line))


def _wild(line: str) -> str:
    return re.escape(line).replace(re.escape("..."), ".*")
