"""``hpcjobs sites init`` on clusters whose answers were recorded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from commandline import Answer, ok, within
from recorded import put_login_node_on_path, put_on_path
from scripted_slurm import answer

from hpcjobs.site.library import load_site

PARTITIONS = "scontrol --all --oneliner show partition"
NODES = "scontrol --all --oneliner show node"
CONFIG = "scontrol show config"
ASSOCIATIONS = "sacctmgr --noheader --parsable2 show associations"
DEFAULT_ACCOUNT = "sacctmgr --noheader --parsable2 show user"


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of PATH for the cluster's commands; its login shell has Lmod with some modules."""
    modules = "/apps/modules/core:\\nopenmpi/4.1.6(default)\\ncuda/12.4\\npython/3.12\\nopenmm/8.1\\ngcc/13\\n"
    shell = f"Welcome!\\nhpcjobs-modules /apps/lmod/lmod|/apps/lmod/lmod\\n{modules}"
    return put_login_node_on_path(tmp_path / "slurm", monkeypatch, modules=shell)


def site_of(*arguments: str) -> dict[str, Any]:
    """The site file that ``sites init ARGUMENTS`` would write."""
    site = ok("sites", "init", "mine", "--dry-run", "--json", *arguments).json["site"]
    assert isinstance(site, dict)
    return site


def refused(*arguments: str) -> Answer:
    done = within("sites", "init", *arguments)
    assert (done.code, done.out) == (5, ""), done
    return done


@pytest.mark.parametrize("cluster", ["cpu", "gpus", "bare"])
def test_the_written_file_takes_a_submission_unedited(cluster: str, commands: Path, here: Path) -> None:
    put_on_path(commands, cluster)
    ok(
        "sites", "init", "mine", "--run-root", "/shared/runs"
    )  # the folders of tests lie in /tmp, which nodes do not share
    (site,) = (here.parent / "home").rglob("site_configs/mine.yaml")
    assert load_site("mine").path == str(site)
    assert ok("submit", "--site", "mine", "--dry-run", "hostname").out.startswith("#!/bin/bash")


def test_where_nodes_are_hidden_each_has_the_mean_of_its_partition_and_the_file_says_so(commands: Path) -> None:
    """PrivateData=nodes."""
    put_on_path(commands, "cpu")
    shown = site_of()["partitions"]
    denied = "echo 'slurm_load_node error: Access/permission denied' >&2; exit 1"
    (commands / "scontrol").rename(commands / "scontrol.all")
    answer(commands, "scontrol", f'case "$*" in *"show node"*) {denied} ;; esac; exec {commands}/scontrol.all "$@"')
    hidden = site_of()["partitions"]
    assert hidden.keys() == shown.keys()
    for name, partition in hidden.items():
        assert partition["nodes"] == shown[name]["nodes"]
        assert partition["node"]["cpus"] == shown[name]["node"]["cpus"]
    assert "# - scontrol show node is refused (PrivateData=nodes)" in ok("sites", "init", "--dry-run").out
    ok("sites", "init", "mine")
    findings = within("sites", "check", "mine", "--json").json["findings"]
    notes = [f["text"] for f in findings if f["subject"].endswith(".nodes")]
    assert set(notes) == {"Slurm hides nodes from you (PrivateData): shapes were not compared"}


def test_a_cluster_of_cpus_gives_limits_qos_preemption_and_the_qos_that_a_partition_needs(commands: Path) -> None:
    put_on_path(commands, "cpu")
    site = site_of()
    assert (site["cluster"], site["defaults"], site["default_qos"]) == ("tu_hpc", {"time": "1h"}, "normal")
    assert site["qos"] == {"normal": "2-00:00:00", "long": "7-00:00:00"}
    assert site["partitions"]["long"]["qos"] == ["long"]
    assert site["partitions"]["long"]["defaults"] == {"qos": "long"}
    assert site["partitions"]["scavenger"]["preemptible"] == "requeue"
    assert site["partitions"]["scavenger"]["grace"] == "60s"
    assert "preemptible" not in site["partitions"]["compute"]
    assert "gpu_request" not in site


def test_no_file_is_advised_whose_name_is_refused(commands: Path) -> None:
    put_on_path(commands, "cpu")
    for arguments in (("--file=mine.yaml", "--", "-y"), ("--file=-y.yaml",), ("--", "-y")):
        answer = refused(*arguments)
        assert ("start with a letter or digit" in answer.err, "--file -y" in answer.err) == (True, False), answer
    assert "--file mine.yaml" in refused("mine", "--file=other.yaml").err


def test_two_gpu_models_in_one_partition_are_groups_of_nodes_with_their_features(commands: Path) -> None:
    put_on_path(commands, "bare")
    partitions = site_of()["partitions"]
    assert [(group["gpus"], group["gpu_model"], group["features"]) for group in partitions["gpu"]["nodes"]] == [
        (4, "v100", ["v100", "ib"]),
        (2, "a100", ["a100"]),
    ]
    assert partitions["quick"]["defaults"] == {"time": "00:30:00"}, "shorter than the default of an hour"


def test_a_cluster_without_accounting_is_described_without_accounts_and_the_file_says_so(commands: Path) -> None:
    put_on_path(commands, "bare")
    text = ok("sites", "init", "mine", "--dry-run").out
    assert not {"qos", "default_qos"} & set(yaml.safe_load(text))
    assert "sacct does not answer here" in text
    assert "defaults.account" not in text, "nothing is enforced: there is nothing to ask"


def test_each_value_has_its_origin_and_each_question_its_command_and_flag(commands: Path) -> None:
    put_on_path(commands, "cpu")
    text = ok("sites", "init", "mine", "--dry-run").out
    assert "# scontrol show config: ClusterName\ncluster: tu_hpc\n" in text
    assert "MaxArraySize = 1001" in text
    assert "module avail, MPI: openmpi/4.1.6." in text, "openmm is no MPI"
    assert "\n# Lmod of a login shell here\nmodule_init: /apps/lmod/lmod/init/bash\n" in text
    assert "#     srun -N1 -t 1 ip -brief address\n#     --interface NAME\n" in text


def test_an_answered_question_is_a_value_and_no_question(commands: Path) -> None:
    put_on_path(commands, "cpu")
    answers = (
        *("--interface", "ib0", "--module", "gcc/13", "--module", "openmpi/4.1.6", "--conda", "train"),
        *("--scratch", "/scratch/$USER", "--run-root", "/work/$USER", "--login", "login.cluster.example"),
        *(
            "--container-runtime",
            "apptainer",
            "--mpi",
            "pmi2",
            "-t",
            "2h",
            "-p",
            "short",
            "-A",
            "admin",
            "-q",
            "normal",
        ),
    )
    done = ok("sites", "init", "mine", "--dry-run", "--json", *answers).json
    site = done["site"]
    assert done["questions"] == []
    assert (site["interface"], site["modules"]) == ("ib0", ["gcc/13", "openmpi/4.1.6"])
    assert (site["environment"], site["containers"]) == ({"conda": "train"}, {"runtime": "apptainer"})
    assert site["defaults"] == {"time": "2h", "account": "admin", "qos": "normal"}
    assert [name for name, partition in site["partitions"].items() if partition.get("default")] == ["short"]


def test_a_file_that_exists_is_replaced_only_by_force(commands: Path, here: Path) -> None:
    put_on_path(commands, "cpu")
    (here / "mine.yaml").write_text("mine\n")
    assert "exists\nhint: --force replaces it" in refused("--file", "mine.yaml").err
    assert (here / "mine.yaml").read_text() == "mine\n"
    ok("sites", "init", "--file", "mine.yaml", "--force")
    assert yaml.safe_load((here / "mine.yaml").read_text())["cluster"] == "tu_hpc"


def test_the_first_line_names_the_schema_that_lies_beside_the_file(commands: Path, here: Path) -> None:
    put_on_path(commands, "cpu")
    ok("sites", "init", "--file", "mine.yaml")
    first = (here / "mine.yaml").read_text().partition("\n")[0]
    assert first == "# yaml-language-server: $schema=hpcjobs-site.schema.json"
    assert (here / "hpcjobs-site.schema.json").read_text() == ok("sites", "schema").out


def test_a_dry_run_writes_nothing(commands: Path, here: Path) -> None:
    put_on_path(commands, "cpu")
    ok("sites", "init", "--dry-run")
    assert not list((here.parent / "home").rglob("*.yaml"))


def test_the_name_is_the_clusters_where_none_is_given(commands: Path, here: Path) -> None:
    put_on_path(commands, "cpu")
    ok("sites", "init")
    assert [path.name for path in (here.parent / "home").rglob("*.yaml")] == ["tu_hpc.yaml"]


def test_a_partition_that_takes_none_of_my_jobs_is_left_out_with_the_reason(commands: Path) -> None:
    put_on_path(
        commands,
        "cpu",
        changes={PARTITIONS: ("PartitionName=short AllowGroups=ALL", "PartitionName=short AllowGroups=nobodys-group")},
    )
    done = ok("sites", "init", "mine", "--dry-run", "--json").json
    assert "short" not in done["site"]["partitions"]
    assert "AllowGroups=nobodys-group" in done["left_out"]["short"]
    assert "your jobs cannot use it" in refused("mine", "-p", "short").err


def test_a_partition_for_one_account_gets_it_as_default_and_one_for_anothers_is_left_out(commands: Path) -> None:
    account = "PartitionName=short AllowGroups=ALL AllowAccounts=admin"
    put_on_path(
        commands, "cpu", changes={PARTITIONS: ("PartitionName=short AllowGroups=ALL AllowAccounts=ALL", account)}
    )
    assert site_of()["partitions"]["short"]["defaults"] == {"account": "admin"}
    put_on_path(
        commands,
        "cpu",
        changes={
            PARTITIONS: ("PartitionName=short AllowGroups=ALL AllowAccounts=ALL", account.replace("admin", "chem"))
        },
    )
    done = ok("sites", "init", "mine", "--dry-run", "--json").json
    assert done["left_out"] == {"short": "account: it takes chem; you have sandbox, admin"}


def test_without_a_default_account_the_first_one_is_named(commands: Path) -> None:
    put_on_path(commands, "cpu", changes={DEFAULT_ACCOUNT: ("sandbox", "")})
    assert site_of()["defaults"] == {"time": "1h", "account": "sandbox"}


def test_srun_gets_an_mpi_type_where_the_cluster_has_none_by_default(commands: Path) -> None:
    put_on_path(commands, "cpu", changes={CONFIG: ("MpiDefault              = pmix", "MpiDefault              = none")})
    assert site_of()["mpi"] == "pmix"


def test_gpus_are_requested_by_gres_where_slurm_has_no_options_for_them(commands: Path) -> None:
    put_on_path(commands, "gpus", changes={CONFIG: ("select/cons_tres", "select/cons_res")})
    assert site_of()["gpu_request"] == "gres"


def test_specialized_memory_is_not_offered_and_a_feature_no_file_can_hold_is_left_out(commands: Path) -> None:
    memory = ("RealMemory=65536", "RealMemory=65536 MemSpecLimit=1536")
    put_on_path(commands, "bare", changes={NODES: memory})
    assert [group["mem"] for group in site_of()["partitions"]["gpu"]["nodes"]] == [64000, 131072]
    put_on_path(commands, "bare", changes={NODES: ("AvailableFeatures=a100", 'AvailableFeatures=ib"edr')})
    text = ok("sites", "init", "mine", "--dry-run").out
    assert "features are left out" in text
    assert all("features" not in group for group in yaml.safe_load(text)["partitions"]["gpu"]["nodes"])


def test_text_of_the_cluster_cannot_leave_its_comment(commands: Path) -> None:
    answer(commands, "bash", "printf 'x\\nhpcjobs-modules |/m\\nopenmpi/1\\r\\nopenmpi/2\\033[31m\\n'")
    put_on_path(commands, "cpu")
    text = ok("sites", "init", "mine", "--dry-run").out
    assert "\r" not in text
    assert "\033" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("../up",), "site name '../up'"),
        (("mine", "--file", "other.yaml"), "the name of the file is the site's name"),
        (("--file", "site.txt"), "a site file is called NAME.yaml"),
        (("mine", "-A", "sandbx"), "did you mean 'sandbox'?"),
        (("mine", "-p", "shrt"), "did you mean 'short'?"),
        (("mine", "-t", "soon"), "'soon' is not a time"),
        (("mine", "--container-runtime", "docker"), "docker"),
    ],
)
def test_a_wrong_answer_is_explained_and_nothing_is_written(
    arguments: tuple[str, ...], message: str, commands: Path, here: Path
) -> None:
    put_on_path(commands, "cpu")
    assert message in refused(*arguments).err
    assert not list((here.parent / "home").rglob("*.yaml"))


def test_without_slurm_the_command_that_is_missing_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(here))
    done = within("sites", "init", "mine")
    assert (done.code, "scontrol: not found on PATH" in done.err) == (9, True), done


def test_a_mistyped_verb_of_sites_is_an_error(here: Path) -> None:
    done = within("sites", "intt")
    assert done.code == 2
    assert "'intt'" in done.err


def test_whole_nodes_and_slices_of_gpus_are_written(commands: Path) -> None:
    put_on_path(commands, "gpus", changes={PARTITIONS: ("OverSubscribe=NO", "OverSubscribe=EXCLUSIVE")})
    assert all(p["defaults"]["exclusive"] is True for p in site_of()["partitions"].values())
    put_on_path(commands, "gpus", changes={NODES: ("Gres=gpu:v100:4", "Gres=gpu:a100:2(S:0-1),gpu:1g.5gb:14(S:0)")})
    text = str(site_of()["partitions"])
    assert "'gpu_models': ['a100:2', '1g.5gb:14']" in text


def test_a_gpu_model_may_be_a_number(commands: Path) -> None:
    put_on_path(commands, "gpus", changes={NODES: ("Gres=gpu:v100:4", "Gres=gpu:3090:4(S:0-1)")})
    groups = site_of()["partitions"]["gpu"]["nodes"]
    assert (4, "3090") in [(group.get("gpus"), group.get("gpu_model")) for group in groups]


@pytest.mark.parametrize(
    ("change", "reason"),
    [(("MaxNodes=2 MaxTime=2-", "MaxNodes=0 MaxTime=2-"), "MaxNodes=0: it takes no jobs"),
     (("PreemptMode=OFF State=UP", "PreemptMode=OFF State=INACTIVE"), "State=INACTIVE: it takes no jobs"),
     (("PreemptMode=OFF State=UP", "PreemptMode=OFF State=DRAIN"), "State=DRAIN: it takes no jobs")],
)  # fmt: skip
def test_a_partition_that_takes_no_jobs_is_not_written(commands: Path, change: tuple[str, str], reason: str) -> None:
    put_on_path(commands, "cpu", changes={PARTITIONS: change})
    done = ok("sites", "init", "mine", "--dry-run", "--json").json
    assert done["left_out"]["compute"] == reason


def test_a_partition_that_takes_jobs_from_other_hosts_alone_is_left_out(commands: Path) -> None:
    here = os.uname().nodename.partition(".")[0]
    text = "PartitionName=compute AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes="
    put_on_path(commands, "cpu", changes={PARTITIONS: (text + "ALL", text + "otherlogin[1-2]")})
    left_out = ok("sites", "init", "mine", "--dry-run", "--json").json["left_out"]
    reason = f"AllocNodes=otherlogin[1-2]: jobs are submitted from these hosts, and this is {here}"
    assert left_out["compute"] == reason
    put_on_path(commands, "cpu", changes={PARTITIONS: (text + "ALL", f"{text}otherlogin1,{here}")})
    assert "compute" in site_of()["partitions"]


def test_a_partition_where_no_job_starts_now_is_not_the_default_one(commands: Path) -> None:
    put_on_path(commands, "cpu")
    assert site_of()["partitions"]["compute"]["default"] is True
    text = "OverTimeLimit=NONE PreemptMode=OFF State=UP TotalCPUs=32 TotalNodes=2"
    put_on_path(commands, "cpu", changes={PARTITIONS: (text, text.replace("UP", "DOWN"))})
    assert "compute" in site_of()["partitions"]
    assert [name for name, one in site_of()["partitions"].items() if "default" in one] == ["scavenger"]


def test_a_partition_with_a_colon_in_its_name_is_written_and_takes_jobs(commands: Path, here: Path) -> None:
    put_on_path(
        commands, "cpu", changes={PARTITIONS: ("=compute ", "=standard96:test "), NODES: ("compute", "standard96:test")}
    )
    ok("sites", "init", "mine", "--run-root", "/shared/runs")
    assert "standard96:test" in load_site("mine").partitions
    script = ok("submit", "--site", "mine", "-p", "standard96:test", "--dry-run", "hostname").out
    assert "#SBATCH --partition=standard96:test\n" in script
    assert ok("sites", "show", "mine", "--json").json["partitions"]["standard96:test"]["nodes"]


def test_a_partition_names_the_account_whose_association_is_valid_in_it(commands: Path) -> None:
    own = "tu_hpc|sandbox||long,normal|normal|\\ntu_hpc|admin||normal||\\n"
    valid = (
        "tu_hpc|sandbox|compute|long,normal|normal|\\ntu_hpc|project|short|normal|normal|\\n"
        "tu_hpc|theory|long|long|long|\\n"
    )
    put_on_path(commands, "cpu", changes={ASSOCIATIONS: (own.replace("\\n", "\n"), valid.replace("\\n", "\n"))})
    proposed = ok("sites", "init", "mine", "--dry-run", "--json").json
    partitions = proposed["site"]["partitions"]
    assert "account" not in partitions["compute"].get("defaults", {})
    assert partitions["short"]["defaults"]["account"] == "project"
    assert partitions["long"]["defaults"] == {"account": "theory"}
    text = ok("sites", "init", "mine", "--dry-run").out
    assert "no account of yours is valid there" in text


def test_the_qos_of_every_account_of_the_user_opens_a_partition(commands: Path) -> None:
    own, more = "|sandbox||long,normal|normal|", "|sandbox||normal|normal|\ntu_hpc|theory||long|long|"
    put_on_path(commands, "cpu", changes={ASSOCIATIONS: (own, more)})
    assert site_of()["partitions"]["long"]["defaults"] == {"account": "theory"}


def test_where_a_plugin_chooses_the_partition_jobs_name_none_and_one_that_takes_them_is_enough(
    commands: Path, here: Path
) -> None:
    put_on_path(commands, "cpu", changes={CONFIG: ("\nClusterName", "\nJobSubmitPlugins = lua\nClusterName")})
    ok("sites", "init", "mine", "--run-root", "/shared/runs")
    submit = ("submit", "--site", "mine", "--dry-run")
    assert "--partition" not in ok(*submit, "-n", "4", "hostname").out
    assert "#SBATCH --partition=short\n" in ok(*submit, "-p", "short", "hostname").out
    partitions = load_site("mine").partitions
    assert partitions["short"].max_time == "01:00:00"
    ok(*submit, "-t", "36h", "hostname")
    refused = within(*submit, "-p", "short", "-t", "36h", "hostname")
    assert refused.code == 5
    assert "-p compute" in refused.err.splitlines()[-1]
    assert within(*submit, "-N", "999", "hostname").code == 5


def test_a_refusal_by_a_qos_names_the_one_that_takes_the_job(commands: Path, here: Path) -> None:
    put_on_path(commands, "cpu")
    ok("sites", "init", "mine", "--run-root", "/shared/runs")
    site = Path(load_site("mine").path)
    site.write_text(site.read_text().replace("max_time: 2-00:00:00", "max_time: 7-00:00:00"))
    refused = within("submit", "--site", "mine", "--dry-run", "-p", "compute", "-t", "3d", "hostname")
    assert refused.code == 5
    assert refused.err.splitlines()[-1] == "hint: takes it: --qos long"


def test_a_time_that_cannot_be_read_is_left_out_with_a_warning(commands: Path) -> None:
    put_on_path(commands, "cpu", changes={PARTITIONS: ("MaxTime=2-00:00:00", "MaxTime=INVALID")})
    answer = within("sites", "init", "mine", "--dry-run", "--json")
    assert answer.code == 0, answer
    assert "MaxTime of partition compute is left out" in answer.err
    assert "max_time" not in answer.json["site"]["partitions"]["compute"]


def test_the_default_qos_refuses_nothing_where_a_plugin_may_choose_another_one(commands: Path, here: Path) -> None:
    put_on_path(commands, "cpu", changes={CONFIG: ("\nClusterName", "\nJobSubmitPlugins = lua\nClusterName")})
    ok("sites", "init", "mine", "--run-root", "/shared/runs")
    site = Path(load_site("mine").path)
    site.write_text(site.read_text().replace("max_time: 2-00:00:00", "max_time: 7-00:00:00"))
    assert "--qos" not in ok("submit", "--site", "mine", "--dry-run", "-t", "3d", "hostname").out
    assert within("submit", "--site", "mine", "--dry-run", "-q", "normal", "-t", "3d", "hostname").code == 5
