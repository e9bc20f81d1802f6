"""The commands that README and docs/ show, and how each block says where it runs.

A fenced block of language ``console`` or ``bash`` has a mark in the line before its fence:

    <!-- run -->                anybody's machine
    <!-- run: sandbox -->       root on Debian, beside a sandbox that the page brings up
    <!-- not run: WHY -->       another machine's

A block of another language after ``<!-- file: NAME -->`` is a file that the reader makes at this point.

The blocks of a page run in their order, in one shell, from a folder like the root of a checkout; what a page shows
under a ``console`` command is compared with what comes out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])

Where = Literal["run", "run: sandbox", "not run", "file"]
_FENCE = re.compile(r"(?m)^```(console|bash)\n(.*?)^```$", re.DOTALL)
_FILE = re.compile(r"(?m)^<!-- file: (\S+) -->\n```[a-z]+\n(.*?)^```$", re.DOTALL)
_MARK = re.compile(r"<!-- (run: sandbox|run|not run: \S.*) -->\n\Z")
_PROMPT = re.compile(r"[$#] ")
_COMMAND_WORDS = r"(?:[$#] )?(?:hpcjobs|make|pip|apt-get|python3?|torchrun|mpirun|srun|sbatch|sudo|git|ssh) "
_INDENTED = re.compile(rf"(?m)(?<=\n\n) {{4}}{_COMMAND_WORDS}.*$")


class Command(NamedTuple):
    """One command of a block, and the lines that the page shows under it (None: it shows none, in a bash block)."""

    text: str
    shown: tuple[str, ...] | None


class Block(NamedTuple):
    """One fenced block: the line it starts at, and where it runs (None: it does not say)."""

    line: int
    where: Where | None
    commands: tuple[Command, ...]


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of ``page`` that hold commands or files, in their order."""
    text = page.read_text(encoding="utf-8")
    files = (
        (match.start(), Block(text.count("\n", 0, match.start()) + 1, "file", (_written(match[1], match[2]),)))
        for match in _FILE.finditer(text)
    )
    yield from (block for _, block in sorted([*_command_blocks(text), *files], key=lambda pair: pair[0]))


def _written(name: str, content: str) -> Command:
    return Command(f"cat >{name} <<'END OF FILE'\n{content}END OF FILE", ())


def _command_blocks(text: str) -> Iterator[tuple[int, Block]]:
    for match in _FENCE.finditer(text):
        mark = _MARK.search(text[: match.start()])
        where: Where | None = None
        if mark:
            where = "not run" if mark[1].startswith("not run") else "run: sandbox" if "sandbox" in mark[1] else "run"
        read = _console if match[1] == "console" else _script
        block = Block(text.count("\n", 0, match.start()) + 1, where, tuple(read(match[2].splitlines())))
        yield match.start(), block


def indented_commands(page: Path) -> list[str]:
    """Commands in indented blocks, which have no place for a mark."""
    return [match.strip() for match in _INDENTED.findall(page.read_text(encoding="utf-8"))]


def tabled_submissions(page: Path) -> list[str]:
    """The ``hpcjobs submit`` commands that stand in tables of ``page``."""
    return re.findall(r"(?m)(?<=^\|).*?`(hpcjobs submit [^`]+)`.*$", page.read_text(encoding="utf-8"))


def _script(lines: list[str]) -> Iterator[Command]:
    for text in "\n".join(lines).replace("\\\n", "").splitlines():
        if text.strip() and not text.startswith("#"):
            yield Command(text, None)


def _console(lines: list[str]) -> Iterator[Command]:
    text: str | None = None
    shown: list[str] = []
    for line in lines:
        if text is not None and text.endswith("\\") and not shown:
            text += "\n" + line.removeprefix("> ")
        elif _PROMPT.match(line):
            if text is not None:
                yield Command(text, tuple(shown))
            text, shown = line[2:], []
        else:
            shown.append(line)
    if text is not None:
        yield Command(text, tuple(shown))
