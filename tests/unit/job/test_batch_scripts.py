"""``#SBATCH`` lines, read as sbatch reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcjobs.errors import RequestError
from hpcjobs.job.options import is_batch_script, read_batch_script


def options_of(here: Path, text: str) -> list[tuple[str, str | None]]:
    (here / "job.sbatch").write_text(text)
    return [(d.option.name, d.value) for d in read_batch_script(here / "job.sbatch").directives]


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("--nodes=2", [("nodes", "2")]),
        ("--nodes 2 # two", [("nodes", "2")]),
        ("-N2 -n 8", [("nodes", "2"), ("ntasks", "8")]),
        ("-HN2", [("hold", None), ("nodes", "2")]),
        ("--exclusive", [("exclusive", None)]),
        ("--exclusive=user", [("exclusive", "user")]),
        ("--comment='a b'\t--mail-type=\"END,FAIL\"", [("comment", "a b"), ("mail-type", "END,FAIL")]),
        ("--comment=a\\ b", [("comment", "a b")]),
        ("--comment=''", [("comment", "")]),
        ("--tasks-per-node=4", [("ntasks-per-node", "4")]),
        ("--ntasks-per-n=4", [("ntasks-per-node", "4")]),
        ("-t 0-2 --mem=4G", [("time", "0-2"), ("mem", "4G")]),
        ("--ear=off --container-image=x", [("ear", "off"), ("container-image", "x")]),  # of plugins
        ("", []),
    ],
)
def test_a_line_is_read_as_sbatch_reads_it(here: Path, line: str, options: list[tuple[str, str | None]]) -> None:
    assert options_of(here, f"#!/bin/bash\n#SBATCH {line}\n") == options


def test_lines_that_begin_with_slurm_are_read_too(here: Path) -> None:
    assert options_of(here, "#!/bin/bash\n#SLURM -N 2\n#SBATCH -n 4\n") == [("nodes", "2"), ("ntasks", "4")]


@pytest.mark.parametrize("line", ["#PBS -l nodes=2:ppn=4", "#BSUB -n 4"])
@pytest.mark.parametrize("before", ["", "true\n"], ids=["at the beginning", "behind a command"])
def test_a_line_that_sbatch_would_translate_is_refused_unless_it_is_to_be_ignored(
    here: Path, monkeypatch: pytest.MonkeyPatch, before: str, line: str
) -> None:
    with pytest.raises(RequestError, match=f"'{line}': sbatch would translate this line") as caught:
        options_of(here, f"#!/bin/bash\n#SBATCH -n 4\n{before}{line}\n")
    assert "#SBATCH --ignore-pbs" in (caught.value.hint or "")
    ignoring = options_of(here, f"#!/bin/bash\n#SBATCH -n 4 --ignore-pbs\n{before}{line}\n")
    assert ignoring == [("ntasks", "4"), ("ignore-pbs", None)]
    monkeypatch.setenv("SBATCH_IGNORE_PBS", "1")
    assert options_of(here, f"#!/bin/bash\n#SBATCH -n 4\n{before}{line}\n") == [("ntasks", "4")]


def test_lines_count_up_to_the_first_command(here: Path) -> None:
    text = (
        "#!/bin/bash\n# SBATCH -N 9\n##SBATCH -N 8\n\n#SBATCH -N 2\n  # a comment\n#SBATCH -n 4\ntrue\n#SBATCH -N 7\n"
    )
    assert options_of(here, text) == [("nodes", "2"), ("ntasks", "4")]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("-N", "job.sbatch:2: -N needs a value"),
        ("--hold=yes", "--hold has no value"),
        ("-Z", "-Z: sbatch has no such option"),
        ("--comment='open", "the quotation ' is not closed"),
        ("hetjob", "jobs of several components are not supported"),
        ("two words", "'two' is no option"),
    ],
)
def test_what_sbatch_would_refuse_is_refused_with_its_line(here: Path, line: str, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        options_of(here, f"#!/bin/bash\n#SBATCH {line}\n")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#!/bin/bash\n#SBATCH -N 1\n", True),
        ("#!/bin/bash\ntrue\n#SBATCH -N 1\n", False),
        ("#SBATCH -N 1\n", True),
        ("#!/bin/bash\n#SLURM -N 1\n", True),
        ("#!/bin/bash\n#PBS -l nodes=1\n", True),
        ("", False),
    ],
)
def test_a_batch_script_is_a_file_with_options_before_its_first_command(here: Path, text: str, expected: bool) -> None:
    (here / "job").write_text(text)
    assert is_batch_script(here / "job") is expected


def test_a_script_without_an_interpreter_is_refused(here: Path) -> None:
    with pytest.raises(RequestError, match="begins with the line of its interpreter"):
        options_of(here, "#SBATCH -N 1\n")


@pytest.mark.parametrize(
    ("text", "reason"),
    [("#!/bin/bash\r\n#SBATCH -N 1\r\n", "line ends of DOS"), ("#!/bin/bash\n#SBATCH -N 1\n\0", "a NUL character")],
)
def test_a_script_that_sbatch_refuses_is_refused_at_once(here: Path, text: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        options_of(here, text)


def test_the_hint_for_a_script_from_dos_takes_no_name_for_an_option(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    Path("-e.sh").write_bytes(b"#!/bin/bash\r\n#SBATCH -n1\r\n")
    with pytest.raises(RequestError) as refused:
        read_batch_script(Path("-e.sh"))
    assert refused.value.hint == "sed -i 's/\\r$//' ./-e.sh"
