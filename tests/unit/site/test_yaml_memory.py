"""A file that was parsed once is not parsed again until it changes, and nobody can tell but by the clock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpcjobs import load_site
from hpcjobs.errors import ConfigError
from hpcjobs.files import cache_dir

LOAD = """
import sys, hpcjobs
print(hpcjobs.load_site("./mine.yaml").partitions["main"].nodes, "yaml" in sys.modules)
"""


def write(nodes: int | str, name: str = "mine") -> None:
    Path(f"{name}.yaml").write_text(f"partitions: {{main: {{nodes: {nodes}, node: {{cpus: 4}}}}}}\n", encoding="utf-8")


def nodes_and_whether_it_was_parsed() -> str:
    return subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, check=True).stdout.strip()


def memory() -> Path:
    (path,) = cache_dir().glob("yaml-*")
    return path


def test_a_file_is_parsed_once_and_again_when_it_has_changed() -> None:
    write(2)
    assert [nodes_and_whether_it_was_parsed() for _ in range(2)] == ["2 True", "2 False"]
    write(3)
    assert [nodes_and_whether_it_was_parsed() for _ in range(2)] == ["3 True", "3 False"]


def test_a_memory_that_is_damaged_or_cannot_be_kept_costs_time_alone() -> None:
    write(2)
    load_site("./mine.yaml")
    for damaged in (b"", b"\x00nonsense", memory().read_bytes()[:-5]):
        memory().write_bytes(damaged)
        assert load_site("./mine.yaml").partitions["main"].nodes == 2
    memory().unlink()
    cache_dir().rmdir()
    cache_dir().touch()  # a folder cannot be made there
    assert load_site("./mine.yaml").partitions["main"].nodes == 2


@pytest.mark.parametrize("wrong", ["two", "2026-11-22"])
def test_a_wrong_file_is_refused_in_the_same_words_each_time(wrong: str) -> None:
    write(wrong)
    messages = set()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"main\.nodes: expected a whole number") as refused:
            load_site("./mine.yaml")
        messages.add(str(refused.value))
    assert len(messages) == 1


def test_the_newest_files_are_remembered_and_no_more() -> None:
    sizes = []
    for number in range(40):
        write(2, f"site{number}")
        load_site(f"./site{number}.yaml")
        sizes.append(memory().stat().st_size)
    assert sizes[10] < sizes[15]
    assert max(sizes[15:]) - min(sizes[15:]) < 100
