"""The centre's policy: what it refuses, where it says so, and that no other file or option undoes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commandline import ok, within
from scripted_slurm import answer
from site_folders import user_folder, write_site
from slurm_rows import print_rows, queued_row

from hpcjobs.errors import ConfigError, RequestError
from hpcjobs.scheduler_kind import KINDS
from hpcjobs.site.library import policies_of_job

POLICY = """\
cluster: big
partitions:
  main: {nodes: 64, node: {cpus: 64, mem: 256G, gpus: 8, gpu_model: a100}}
  debug: {nodes: 4, node: {cpus: 64, mem: 256G}}
  admin: {nodes: 4, node: {cpus: 64, mem: 256G}}
defaults: {time: 1h, account: a1}
directives: {comment: "comment={value}"}
policy:
  partitions: [main, debug]
  max_nodes: 8
  max_gpus: 16
  max_time: 1-00:00:00
  account_required: true
  accounts: [a1, a2]
  mandatory: {mail_type: FAIL, comment: centre}
  messages: ["Maintenance on Tuesday; see https://centre.example"]
"""
REFUSED = RequestError.exit_code


@pytest.fixture
def centre(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The centre's file, with its policy."""
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "xdg"))
    return write_site(tmp_path / "xdg" / "hpcjobs" / "site_configs", "big", POLICY)


def submit(*arguments: str, site: str = "big") -> str:
    """The script of a job that the policy lets pass."""
    return ok("submit", "--site", site, "--dry-run", *arguments, "true").out


def refusal(*arguments: str, site: str = "big") -> str:
    answer = within("submit", "--site", site, "--dry-run", *arguments, "true")
    assert answer.code == REFUSED, answer
    assert "a policy of the centre refuses the job:" in answer.err
    return answer.err


def test_what_is_mandatory_is_requested_and_the_message_is_printed(centre: Path) -> None:
    answer = ok("submit", "--site", "big", "--dry-run", "true")
    assert "#SBATCH --mail-type=FAIL" in answer.out
    assert "#SBATCH --comment=centre" in answer.out
    assert "hpcjobs: Maintenance on Tuesday; see https://centre.example" in answer.err
    sources = {row["name"]: row["source"] for row in ok("submit", "--site", "big", "--explain", "--json", "true").json}
    assert sources["mail_type"] == f"policy {centre}"


@pytest.mark.parametrize(
    ("arguments", "line", "text"),
    [
        (["-p", "admin"], 9, "partition=admin (flag): allowed are main, debug"),
        (["-p", "main,admin"], 9, "allowed are main, debug"),
        (["-N", "9"], 10, "nodes=9 (flag): at most 8 nodes"),
        (["-N", "1-9"], 10, "at most 8 nodes"),
        (["-N", "8", "--spare", "1"], 10, "at most 8 nodes"),
        (["-N", "4", "--gpus-per-node", "8"], 11, "32 GPUs in all, at most 16"),
        (["-G", "24", "-N", "3"], 11, "at most 16"),
        (["-t", "2-00:00:00"], 12, "at most 1-00:00:00"),
        (["-t", "UNLIMITED"], 12, "at most 1-00:00:00"),
        (["-A", "other"], 14, "account=other (flag): allowed are a1, a2"),
        (["--mail-type", "NONE"], 15, "mail_type=NONE (flag): must be FAIL"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_exceeds_the_policy_is_refused_with_its_file_and_line(
    centre: Path, arguments: list[str], line: int, text: str
) -> None:
    message = refusal(*arguments)
    assert text in message
    assert f"({centre}:{line})" in message


def test_everything_that_is_wrong_is_named_at_once(centre: Path) -> None:
    message = refusal("-N", "9", "-A", "x", "-t", "3-0")
    assert message.count(f"({centre}:") == 3


def test_gpus_whose_model_is_a_number_count(centre: Path) -> None:
    write_site(user_folder(), "mine", 'extends: big\npartitions: {main: {node: {gpu_model: "3090"}}}\n')
    assert "32 GPUs in all, at most 16" in refusal("-N", "4", "--gres", "gpu:3090:8", site="mine")


def test_what_the_policy_allows_is_submitted(centre: Path) -> None:
    assert "#SBATCH --nodes=8" in submit("-N", "8", "-p", "main", "--gpus-per-node", "2", "-A", "a2", "-t", "1-0")


UNDOING = {
    "a partition of its own": ("partitions: {admin: {default: true}}", "partition=admin"),
    "another default": ("defaults: {nodes: 32}", "nodes=32"),
    "no account": ("defaults: {account: null}", "no account is named"),
    "no time": ("defaults: {time: null}", "no time limit is requested"),
    "another mail": ("defaults: {mail_type: NONE}", "mail_type=NONE"),
}


@pytest.mark.parametrize(("text", "message"), UNDOING.values(), ids=UNDOING.keys())
@pytest.mark.parametrize(
    "head", ["extends: big\n", "cluster: BIG\npartitions: {admin: {nodes: 64, node: {cpus: 8}}}\n"]
)
def test_no_file_of_a_user_undoes_it_whether_it_extends_the_centres_or_not(
    centre: Path, head: str, text: str, message: str
) -> None:
    if "partitions:" in head and text.startswith("partitions:"):
        text = "description: the partition alone"
    write_site(user_folder(), "mine", head + text + "\n")
    assert message in refusal(site="mine")


def test_a_file_of_the_centres_name_comes_under_its_policy(centre: Path) -> None:
    write_site(user_folder(), "big", "cluster: other\npartitions: {main: {nodes: 64, node: {cpus: 64}}}\n")
    assert f"at most 8 nodes ({centre}:10)" in refusal("-N", "9", "-A", "a1", "-t", "1h")


def test_a_file_that_states_another_cluster_comes_under_the_policy_of_the_one_that_slurm_reaches(
    centre: Path, tmp_path: Path
) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=big\n")
    write_site(
        user_folder(),
        "mine",
        f"cluster: mine\nslurm_conf: {tmp_path}/slurm.conf\npartitions: {{main: {{nodes: 64, node: {{cpus: 64}}}}}}\n",
    )
    assert f"at most 8 nodes ({centre}:10)" in refusal("-N", "9", "-A", "a1", "-t", "1h", site="mine")


def test_a_site_of_another_cluster_is_free_of_it(centre: Path) -> None:
    write_site(user_folder(), "mine", "cluster: mine\npartitions: {main: {nodes: 64, node: {cpus: 64}}}\n")
    assert "#SBATCH --nodes=9" in submit("-N", "9", site="mine")


def test_a_spec_file_and_a_batch_script_come_under_it_too(centre: Path, here: Path) -> None:
    (here / "job.yaml").write_text("resources: {nodes: 9}\n")
    assert "nodes=9 (job.yaml)" in refusal("--spec", "job.yaml")
    (here / "job.sbatch").write_text("#!/bin/bash\n#SBATCH -N 9\n#SBATCH -p admin\nsrun hostname\n")
    answer = within("submit", "--site", "big", "--dry-run", "job.sbatch")
    assert answer.code == REFUSED
    for text in ("nodes=9", "partition=admin", "no account is named", "no time limit is requested"):
        assert text in answer.err


def test_the_centres_own_replacements_of_options_are_its_own_affair(centre: Path) -> None:
    write_site(user_folder(), "mine", "extends: big\nmpi: pmix\n")
    assert "#SBATCH --comment=centre" in submit(site="mine")


@pytest.mark.parametrize("text", ["policy: {max_nodes: 1000}", "policy: null", "policy: {}"])
def test_only_the_centres_files_have_a_policy(centre: Path, text: str) -> None:
    path = write_site(user_folder(), "mine", f"extends: big\n{text}\n")
    answer = within("submit", "--site", "mine", "--dry-run", "true")
    assert answer.code == ConfigError.exit_code
    assert f"{path}:2: policy: only a file of the centre has one" in answer.err


def test_no_variable_hides_the_policy_of_another_of_the_centres_folders(
    centre: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_site(tmp_path / "mine", "big", "extends: big\npolicy: {max_nodes: 1000}\n")
    monkeypatch.setenv("HPCJOBS_SITE_PATH", str(tmp_path / "mine"))
    assert f"at most 8 nodes ({centre}:10)" in refusal("-N", "9")


SMALL = "cluster: small\npartitions: {main: {nodes: 64, node: {cpus: 64}}}\npolicy: {messages: [small]}\n"


@pytest.mark.parametrize("name", ["mine", "small"])
def test_a_file_on_top_of_another_clusters_stays_under_the_policy_of_the_cluster_that_it_states(
    centre: Path, name: str
) -> None:
    write_site(centre.parent, "small", SMALL)
    write_site(user_folder(), name, "extends: small\ncluster: big\n")
    assert f"at most 8 nodes ({centre}:10)" in refusal("-N", "9", "-A", "a1", "-t", "1h", site=name)


def test_a_policy_in_a_folder_of_ones_own_does_not_replace_that_of_the_cluster(
    centre: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_site(tmp_path / "mine", "lax", SMALL.replace("cluster: small", "cluster: big"))
    monkeypatch.setenv("HPCJOBS_SITE_PATH", str(tmp_path / "mine"))
    assert f"at most 8 nodes ({centre}:10)" in refusal("-N", "9", "-A", "a1", "-t", "1h", site="lax")


def test_one_of_two_clusters_of_the_same_login_nodes_has_its_own_policy_alone(
    centre: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=big\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    write_site(centre.parent, "small", SMALL + "sbatch: [clusters=small]\n")
    assert "#SBATCH --nodes=9" in submit("-N", "9", site="small")
    write_site(centre.parent, "small", SMALL)
    assert f"at most 8 nodes ({centre}:10)" in refusal("-N", "9", site="small")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("policy: {max_node: 4}", "policy.max_node: unknown key"),
        ("policy: {max_time: long}", "policy.max_time: "),
        ("policy: {max_nodes: 0}", "policy.max_nodes: max_nodes must be positive"),
        ("policy: {mandatory: {nodes: 0}}", "policy.mandatory.nodes: nodes must be 1 or more"),
    ],
)
def test_a_mistake_in_a_policy_is_named_with_file_and_line(centre: Path, text: str, message: str) -> None:
    centre.write_text(POLICY.partition("policy:")[0] + text + "\n")
    answer = within("submit", "--site", "big", "--dry-run", "true")
    assert answer.code == ConfigError.exit_code
    assert f"{centre}:8: {message}" in answer.err


def test_a_policy_without_a_cluster_is_refused(centre: Path) -> None:
    centre.write_text(POLICY.replace("cluster: big\n", "description: no cluster\n"))
    answer = within("submit", "--site", "big", "--dry-run", "true")
    assert answer.code == ConfigError.exit_code
    assert f"{centre}:8: policy: the file names no cluster" in answer.err


def test_a_policy_of_a_scheduler_without_nodes_needs_no_cluster(centre: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "spool", KINDS["local"])
    centre.write_text(POLICY.replace("cluster: big\n", "scheduler: spool\n"))
    assert [policy.path for policy in policies_of_job("big", ())] == [str(centre)]


@pytest.fixture
def queued(centre: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job 42 that waits, by a user's file that extends the centre's; gives the folder of Slurm's answers."""
    write_site(user_folder(), "mine", "extends: big\n")
    answers = tmp_path / "slurm"
    answers.mkdir()
    answer(answers, "sbatch", "echo '42;big'")
    answer(answers, "sacct", ":")
    answer(answers, "scontrol", 'case "$*" in *config*) echo "ClusterName = big" ;; esac')
    monkeypatch.setenv("PATH", f"{answers}:/usr/bin:/bin")
    script = Path(ok("submit", "--site", "mine", "-t", "20h", "--json", "true").json["run_dir"]) / "job.sh"
    own = {"JobID": 42, "JobName": "true", "TimeLimit": "20:00:00", "Command": script}
    row = queued_row(**own, State="PENDING", Reason="Priority", Submit="N/A")
    answer(answers, "squeue", print_rows(row))
    record = "JobId=42 JobState=PENDING TimeLimit=20:00:00"
    answer(answers, "scontrol", f'case "$*" in *config*) echo "ClusterName = big" ;; *show*) echo "{record}" ;; esac')
    return answers


def sent(answers: Path) -> list[str]:
    request = answers / "scontrol.asked"
    lines = request.read_text().splitlines() if request.exists() else []
    return [line for line in lines if line.startswith("update")]


@pytest.mark.parametrize(
    ("setting", "line", "text"),
    [
        ("time=2-00:00:00", 12, "time=2-00:00:00 (update): at most 1-00:00:00"),
        ("time=+5h", 12, "time=1-01:00:00 (update): at most 1-00:00:00"),
        ("TimeLimit=UNLIMITED", 12, "at most 1-00:00:00"),
        ("TimeLimit+=23:00:00", 12, "time=1-19:00:00 (update): at most 1-00:00:00"),
        ("Timel=3000", 12, "at most 1-00:00:00"),
        ("partition=admin", 9, "partition=admin (update): allowed are main, debug"),
        ("nodes=9", 10, "nodes=9 (update): at most 8 nodes"),
        ("NumNodes=1-9", 10, "at most 8 nodes"),
        ("gres=gpu:a100:17", 11, "17 GPUs in all, at most 16"),
        ("account=other", 14, "account=other (update): allowed are a1, a2"),
        ("account=", 13, "no account is named"),
        ("mail_type=NONE", 15, "must be FAIL"),
        ("comment=mine", 15, "must be centre"),
    ],
)
def test_a_job_that_waits_is_not_changed_to_what_the_policy_refuses(
    queued: Path, centre: Path, setting: str, line: int, text: str
) -> None:
    answer = within("update", "42", setting)
    assert answer.code == REFUSED, answer
    assert "a policy of the centre refuses the change:" in answer.err
    assert text in answer.err
    assert f"({centre}:{line})" in answer.err
    assert sent(queued) == []


def test_what_the_policy_allows_is_changed_also_of_a_job_that_is_older_than_the_policy(
    queued: Path, centre: Path
) -> None:
    for setting in ("time=+4h", "nodes=8", "partition=debug", "nice=10", "qos=", "Priority=7"):
        ok("update", "42", setting)
    assert [arguments.split()[-1] for arguments in sent(queued)] == [
        "TimeLimit=+04:00:00", "NumNodes=8", "Partition=debug", "Nice=10", "QOS=", "Priority=7",
    ]  # fmt: skip
    centre.write_text(POLICY.replace("[a1, a2]", "[a2]"))
    ok("update", "42", "nice=20")
    assert "allowed are a2" in within("update", "42", "account=a3").err


def test_a_run_is_repeated_only_as_the_policy_of_today_allows(queued: Path, centre: Path) -> None:
    ok("rerun", "42", "--dry-run")
    centre.write_text(POLICY.replace("max_time: 1-00:00:00", "max_time: 10h"))
    answer = within("rerun", "42", "--dry-run")
    assert answer.code == REFUSED
    assert f"time=20:00:00 (flag): at most 10:00:00 ({centre}:12)" in answer.err


def test_a_change_is_free_where_no_policy_holds(queued: Path, centre: Path) -> None:
    centre.write_text(POLICY.partition("policy:")[0])
    ok("update", "42", "time=9-00:00:00")
    assert sent(queued)[-1].endswith("TimeLimit=9-00:00:00")


BATCH_HEAD = "#!/bin/bash\n#SBATCH -A a1 -p main -t 60\n"


def batch_refusal(here: Path, options: str) -> str:
    """What the policy says to a batch script with ``options``."""
    (here / "job.sbatch").write_text(f"{BATCH_HEAD}#SBATCH {options}\nsrun hostname\n")
    answer = within("submit", "--site", "big", "--dry-run", "job.sbatch")
    assert answer.code == REFUSED, answer
    return answer.err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("-N 8 --ntasks-per-node 8 --gpus-per-task 1", "gpus_per_task=1 (job.sbatch:3): 64 GPUs in all"),
        ("-N 8 --ntasks 64 --ntasks-per-gpu 1", "ntasks_per_gpu=1 (job.sbatch:3): 64 GPUs in all"),
        ("-N 8 --gres gres/gpu:a100:4", "gpus_per_node=4 (job.sbatch:3): 32 GPUs in all"),
    ],
)
def test_the_gpus_that_a_batch_script_requests_count(centre: Path, here: Path, options: str, text: str) -> None:
    assert text in batch_refusal(here, options)


@pytest.mark.parametrize("mark", ["#PBS", "#BSUB"])
def test_no_value_of_several_lines_becomes_an_option_of_the_job(centre: Path, mark: str) -> None:
    for arguments in (["--env", f"X=a\n{mark} -q admin", "true"], ["true", f"a\n{mark} -q admin"]):
        answer = within("submit", "--site", "big", "--dry-run", *arguments)
        assert answer.code == REFUSED, answer
        assert f'the script has the line "{mark} -q admin' in answer.err


def on_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This login node's own cluster is small, of which no site file of the centre speaks."""
    (tmp_path / "slurm.conf").write_text("ClusterName=small\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))


MINE = "cluster: mine\npartitions: {main: {nodes: 64, node: {cpus: 64}}}\ndefaults: {time: 1h, account: a1}\n"


@pytest.mark.parametrize("clusters", ["BIG", "other, big", "all"])
def test_the_policy_of_each_cluster_that_may_get_the_job_holds(
    centre: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clusters: str
) -> None:
    on_small(tmp_path, monkeypatch)
    write_site(user_folder(), "mine", MINE)
    assert "#SBATCH --nodes=9" in submit("-N", "9", site="mine")
    monkeypatch.setenv("SLURM_CLUSTERS", clusters)
    assert "at most 8 nodes" in refusal("-N", "9", site="mine")
    monkeypatch.setenv("SLURM_CLUSTERS", "small")
    write_site(user_folder(), "mine", MINE + f"sbatch: ['clusters={clusters}']\n")
    assert "at most 8 nodes" in refusal("-N", "9", site="mine")


def test_a_batch_script_goes_to_the_cluster_that_the_site_names(
    centre: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=big\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    write_site(user_folder(), "mine", MINE + "sbatch: [clusters=small]\n")
    (here / "job.sbatch").write_text("#!/bin/bash\n#SBATCH -N 9\nsrun hostname\n")
    assert "#SBATCH --clusters=small" in ok("submit", "--site", "mine", "--dry-run", "job.sbatch").out


def test_a_centres_folder_that_cannot_be_read_ends_the_command_and_not_the_policy(centre: Path) -> None:
    write_site(user_folder(), "mine", "cluster: big\npartitions: {main: {nodes: 64, node: {cpus: 64}}}\n")
    centre.unlink()
    centre.parent.rmdir()
    centre.parent.symlink_to(centre.parent)  # a circle, which root cannot read either
    answer = within("submit", "--site", "mine", "--dry-run", "true")
    assert answer.code == ConfigError.exit_code
    assert f"the centre's folder {centre.parent} cannot be read" in answer.err


def test_many_tasks_of_a_batch_script_need_not_have_a_node_each(centre: Path, here: Path) -> None:
    (here / "job.sbatch").write_text(f"{BATCH_HEAD}#SBATCH --ntasks=64\nsrun hostname\n")
    ok("submit", "--site", "big", "--dry-run", "job.sbatch")


def test_a_manifest_of_a_job_under_a_policy_of_an_earlier_version_can_be_read(queued: Path, here: Path) -> None:
    (path,) = here.glob("runs/*/manifest.json")
    manifest = json.loads(path.read_text())
    manifest["job"]["policies"][0] |= {"gpus_of_nodes": {"main": 8}, "exclusive": []}
    path.write_text(json.dumps(manifest))
    ok("rerun", "42", "--dry-run")
