"""Options of sbatch, typed as sbatch takes them, on every verb that submits jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commandline import ok, within

from hpcjobs.cli.options import SBATCH_OPTIONS, SWITCH, VALUE_OF_BARE, SbatchOption
from hpcjobs.site.models import Resources

VALUES = {
    "nodes": "2-4", "gpus_per_node": "a100:4", "mem": "8G", "mem_per_cpu": "2G", "mem_per_gpu": "20G",
    "time": "01:00:00",
    "time_min": "00:30:00", "array": "0-9%2", "dependency": "afterok:7", "mail_type": "END,FAIL", "open_mode": "append",
    "signal": "B:USR1@60", "gres": "nvme:1", "acctg_freq": "30", "nodefile": "nodes.txt",
}  # fmt: skip
PER_NODE = {
    "ntasks": "--ntasks-per-node=3", "gpus": "--gpus-per-node=a100:3", "gpus_per_task": "--gpus-per-node=a100:3",
    "cpus_per_gpu": "--cpus-per-task=3", "ntasks_per_gpu": "--ntasks-per-node=3",
    "nodefile": "--nodelist=n1",
}  # fmt: skip
"""Options that sbatch gets as numbers per node, which every launcher needs, and a file as what it names."""


OF_OTHER_SHAPE = ("array", "ntasks", "ntasks_per_node", "gpus", "gpus_per_task", "ntasks_per_gpu")
"""Studies and sessions choose tasks and nodes themselves."""


@pytest.fixture
def site(here: Path) -> str:
    """A site that refuses nothing that is asked for here."""
    partitions = {
        "a": {"default": True, "nodes": 8, "node": {"cpus": 64, "mem": "500G", "gpus": 4, "gpu_model": "a100"}}
    }
    (here / "nodes.txt").write_text("n1\n")
    (here / "wide.yaml").write_text(json.dumps({"partitions": partitions, "gpu_request": "gpus-per-node"}))
    return "./wide.yaml"


def test_every_option_that_a_job_can_have_is_declared_once() -> None:
    fields = [option.field for option in SBATCH_OPTIONS]
    assert sorted(fields) == sorted(set(Resources.__struct_fields__) - {"clusters"})
    flags = [flag for option in SBATCH_OPTIONS for flag in option.flags]
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize("option", SBATCH_OPTIONS, ids=lambda option: option.field)
def test_an_option_typed_as_for_sbatch_reaches_sbatch(site: str, option: SbatchOption) -> None:
    value = VALUES.get(option.field, "3" if option.kind is int or option.field in PER_NODE else "a")
    arguments = [min(option.flags, key=len).partition("/")[0]] + ([] if option.kind is SWITCH else [value])
    arguments = [f"{option.flag}={value}"] if option.flag in VALUE_OF_BARE else arguments
    arguments += ["--gpus", "1"] if option.field in ("cpus_per_gpu", "ntasks_per_gpu") else []
    script = ok("submit", "--site", site, *arguments, "--dry-run", "true").out
    line = option.flag if option.kind is SWITCH else f"{option.flag}={value}"
    line = PER_NODE.get(option.field, line)
    assert f"#SBATCH {line}\n" in script


@pytest.mark.parametrize("verb", ["submit", "where", "alloc", "sweep --set a=1", "scale", "rerun", "jupyter"])
def test_exclusive_has_a_value_or_none_on_every_verb(verb: str) -> None:
    """``--exclusive PROGRAM``: the program is no value of it."""
    name, *arguments = verb.split()
    for option in ("--exclusive", "--exclusive=user"):
        assert "Option '--exclusive'" not in within(name, *arguments, option, "--site", "none", "true").err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--exclusive true", "--exclusive"),
        ("--exclusive=user true", "--exclusive=user"),
        ("-N 2 --exclusive true --exclusive=mcs", "--exclusive"),
        ("-JN --exclusive=topo -c 2 true", "--exclusive=topo"),
        ("--comment=--exclusive true", None),
        ("true --exclusive", None),
    ],
)
def test_exclusive_stands_as_sbatch_has_it(site: str, arguments: str, line: str | None) -> None:
    script = ok("submit", "--site", site, "--dry-run", *arguments.split()).out
    sent = [text.removeprefix("#SBATCH ") for text in script.splitlines() if text.startswith("#SBATCH --exclusive")]
    assert sent == ([] if line is None else [line])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("sweep", "--set", "lr=1,2", "-C", "ib", "--dry-run", "--json", "true"), None),
        (("jupyter", "-C", "ib", "--dry-run"), "#SBATCH --constraint=ib"),
    ],
    ids=["sweep", "jupyter"],
)
def test_other_verbs_take_the_same_options(site: str, arguments: tuple[str, ...], line: str | None) -> None:
    out = (
        ok(arguments[0], "--site", site, *arguments[1:]).out
        if arguments[0] == "jupyter"
        else ok(*arguments[:1], "--site", site, *arguments[1:]).out
    )
    assert line is None or line in out


@pytest.mark.parametrize("verb", ["submit", "sweep run", "scale", "jupyter"])
def test_help_names_every_option(verb: str) -> None:
    text = " ".join(ok(*verb.split(), "--help").out.split())
    missing = [
        option.flag for option in SBATCH_OPTIONS if option.flag not in text and option.field not in OF_OTHER_SHAPE
    ]
    assert missing == []


def test_an_option_that_is_given_twice_is_refused(site: str) -> None:
    answer = within("submit", "--site", site, "-C", "ib", "-o", "constraint=gpu", "--dry-run", "true")
    assert answer.code == 5
    assert "constraint has been given by its own flag too" in answer.err


def test_a_dependency_of_ones_own_and_after_add_up(here: Path, site: str) -> None:
    assert "--dependency=singleton" in ok("submit", "--site", site, "-d", "singleton", "--dry-run", "true").out
    submitted = ok("submit", "--site", "local", "true").out.split()[1]
    for own in (("-d", "singleton"), ("-o", "dependency=singleton")):
        out = ok("submit", "--site", "local", *own, "--after", submitted, "--dry-run", "--json", "true").out
        assert json.loads(out)["job"]["resources"]["dependency"] == f"singleton,afterok:{submitted}"


def script(site: str, *arguments: str) -> str:
    """The script that a dry run prints."""
    return ok("submit", "--site", site, *arguments, "--dry-run", "true").out


def test_options_that_hpcjobs_does_not_have_are_passed_through_unread(here: Path, site: str) -> None:
    """By --sbatch and --srun, in files, and those that sbatch has by their own names."""
    (here / "job.yaml").write_text("sbatch: [delay-boot=10]\nsrun: [cpu-bind=cores]\n")
    text = script(
        site, "--spec", "job.yaml", "--sbatch", "some-plugin=a b", "--srun", "--mem-bind=local", "--mincpus", "8"
    )
    for line in ("#SBATCH --delay-boot=10", "#SBATCH --some-plugin='a b'", "#SBATCH --mincpus=8"):
        assert f"\n{line}\n" in text
    assert "--cpu-bind=cores --mem-bind=local" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--sbatch", "nodes=4"), "hpcjobs has this option itself\nhint: use --nodes"),
        (("--sbatch", "output=x"), "the output is in the run folder"),
        (("--sbatch", "two words"), "sbatch 'two words' (flag): no option"),
        (("--srun", "ntasks=4"), "the job's own layout sets it"),
        (("--srun", "output=x"), "hpcjobs logs shows the output"),
        (("--srun", "cpu-bind=cores", "--launcher", "mpirun"), "launcher mpirun starts the tasks without srun"),
        (
            ("--output", "x.log"),
            "--output is an option of sbatch that hpcjobs does not take\nhint: the output is in the run folder",
        ),
        (("-e", "x.log"), "--error is an option of sbatch that"),
        (("--export", "ALL"), "--env NAME=VALUE"),
        (("-o", "x.log"), "sbatch's own -o FILE is not needed"),
        (("-o", "chdir=x"), "use --chdir"),
        (("-o", "name=x"), "use --name"),
        (("-o", "mincpus=2"), "use --sbatch mincpus=VALUE"),
        (("-t", "1h", "-o", "time=2h"), "time has been given by its own flag too"),
    ],
)
def test_what_is_not_passed_through_says_why(site: str, arguments: tuple[str, ...], text: str) -> None:
    answer = within("submit", "--site", site, *arguments, "--dry-run", "true")
    assert (answer.code, answer.out) == (5, "")
    assert text in answer.err


def test_requeue_can_be_forbidden_as_sbatch_does_it(site: str) -> None:
    assert "#SBATCH --no-requeue\n" in script(site, "--no-requeue")
    assert "#SBATCH --requeue\n" in script(site, "--requeue")


def test_a_name_is_given_as_for_sbatch(site: str) -> None:
    assert "#SBATCH --job-name=mine\n" in script(site, "--job-name", "mine")


def test_a_bare_number_is_minutes_as_sbatch_reads_it_and_a_number_of_yaml_is_refused(here: Path, site: str) -> None:
    """YAML makes a number of an unquoted 12:30:00."""
    assert "#SBATCH --time=01:30:00\n" in script(site, "-t", "90")
    (here / "job.yaml").write_text("resources:\n  time: 12:30:00\n")
    answer = within("submit", "--site", site, "--spec", "job.yaml", "true")
    assert (answer.code, "45000 to YAML" in answer.err) == (4, True), answer


def test_a_scaling_study_passes_options_through_as_submit_does(site: str, here: Path) -> None:
    options = ("--mincpus", "8", "--sbatch", "delay-boot=10", "--srun", "mem-bind=local")
    within("scale", "--site", site, "--name", "s", "--repeats", "1", *options, "true")  # there is no sbatch here
    folder = Path(json.loads((here / "s.study.json").read_text())["folder"])
    job = json.loads((folder / "sweep.json").read_text())["sizes"]["1x1"]
    assert sorted(job["sbatch"]) == ["delay-boot=10", "mincpus=8"]
    assert job["srun"] == ["mem-bind=local"]
