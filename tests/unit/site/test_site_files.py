"""Site files: what they may say, what is said about mistakes, and where they are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcjobs import load_site
from hpcjobs.data import data_folder
from hpcjobs.errors import ConfigError, HpcJobsWarning
from hpcjobs.files import config_dir
from hpcjobs.job.models import JobSpec
from hpcjobs.site import machine
from hpcjobs.site.library import default_site, find_default_site
from hpcjobs.site.machine import cluster_name
from hpcjobs.site.search import list_sites
from hpcjobs.site.yaml_file import read_yaml

SHIPPED = sorted(path.stem for path in data_folder("site_configs").glob("*.yaml"))
SMALLEST = "partitions: {main: {nodes: 2, node: {cpus: 4}}}\n"


def site_file(text: str, name: str = "mine", folder: str = "site_configs") -> Path:
    path = Path(folder) / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path.absolute()


def refusal(text: str) -> str:
    site_file(text)
    with pytest.raises(ConfigError) as caught:
        load_site("mine")
    return str(caught.value)


def test_seven_sites_are_shipped() -> None:
    assert SHIPPED == ["a10g-box", "gcp-t4", "local", "nebius-h100", "rocky-4070", "sandbox", "tu-hpc"]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_site_loads_and_knows_its_file(name: str) -> None:
    site = load_site(name)
    assert (site.name, Path(site.path)) == (name, data_folder("site_configs") / f"{name}.yaml")
    assert site.description


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (SMALLEST + "modles: [openmpi]\n", 2, ["modles: unknown key", "did you mean 'modules'?"]),
        ("partitions:\n  main:\n    nodes: 2\n    node: {cpu: 4}\n", 4, ["partitions.main.node.cpu", "'cpus'?"]),
        (SMALLEST + "defaults:\n  ntask: 4\n", 3, ["defaults.ntask: unknown key", "did you mean 'ntasks'"]),
        (SMALLEST + "defaults:\n  time: 12:30:00\n", 3, ["defaults.time", "45000 to YAML", "'2h'"]),
        (SMALLEST + "defaults: {time: soon}\n", 2, ["defaults.time", "'soon' is not a time", "2h"]),
        (SMALLEST + "defaults:\n  mem: 64Q\n", 3, ["'64Q' is not a memory size", "64G"]),
        (SMALLEST + "defaults:\n  nodes: 0\n", 3, ["nodes must be 1 or more"]),
        (SMALLEST + "defaults:\n  nodes: two\n", 3, ["defaults.nodes", "write 4, or 2-4"]),
        (SMALLEST + "\ngpu_request: gpus\n", 3, ["gpu_request", "gpus"]),
        (SMALLEST + "modules: openmpi\n", 2, ["modules: expected a list, got text"]),
        (SMALLEST + "env:\n  A: 1\n", 3, ["env", "expected text, got a whole number"]),
        (SMALLEST + "environment: {conda: a, venv: /b}\n", 2, ["use conda or venv, not both"]),
        ("description: none\n", 1, ["needs at least one partition"]),
        (SMALLEST + "a: [1\n", 3, ["not valid YAML"]),
        (SMALLEST + "a:\n\t- b\n", 3, ["not valid YAML"]),
        ("- a\n- b\n", 1, ["expected a mapping"]),
    ],
)
def test_a_mistake_is_named_with_file_line_and_key(text: str, line: int, message: list[str]) -> None:
    error_message = refusal(text)
    assert all(arguments in error_message for arguments in message), error_message
    assert f"site_configs/mine.yaml:{line}:" in error_message


def test_keys_that_only_the_loader_sets_are_neither_suggested_nor_accepted() -> None:
    message = refusal(SMALLEST + "modles: [openmpi]\n")
    assert all(f" {key}," not in message for key in ("path", "rehearsal", "extended", "untrusted", "policies"))
    assert "mine.yaml: rehearsal: hpcjobs sets this key itself" in refusal(SMALLEST + "rehearsal: true\n")


def test_the_partition_at_fault_is_named_among_others() -> None:
    message = refusal(
        "partitions:\n  good: {nodes: 1, node: {cpus: 1}}\n  bad: {nodes: 1, node: {cpus: 1}, max_time: 99}\n"
    )
    assert "mine.yaml:3: partitions.bad.max_time" in message


def test_a_file_that_is_no_text_is_refused_by_name() -> None:
    site_file("").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"mine\.yaml: cannot be read"):
        load_site("mine")


def test_a_site_cannot_give_itself_another_name() -> None:
    assert "mine.yaml: name 'other': the name of the file is the site's name" in refusal(SMALLEST + "name: other\n")


def test_the_same_key_twice_is_refused() -> None:
    assert "mine.yaml:3: not valid YAML: key 'mpi' stands here twice" in refusal(SMALLEST + "mpi: pmix\nmpi: pmi2\n")


def test_the_working_folder_comes_before_the_users_own_and_the_shipped_sites(here: Path) -> None:
    home = Path.home() / ".config" / "hpcjobs" / "site_configs"
    users = site_file(SMALLEST, "tu-hpc", str(home))
    assert load_site("tu-hpc").path == str(users)
    local = site_file(SMALLEST, "tu-hpc")
    with pytest.warns(HpcJobsWarning, match="which shadows"):
        assert load_site("tu-hpc").path == str(local)
    answer = [(entry.path, entry.shadowed) for entry in list_sites() if entry.name == "tu-hpc"]
    assert answer == [(local, False), (users, True), (data_folder("site_configs") / "tu-hpc.yaml", True)]


def test_a_centres_sites_come_after_the_users_and_before_the_examples(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.setenv("HPCJOBS_SITE_PATH", f":relative:{first}:{second}")
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "xdg"))
    site_file(SMALLEST, "tu-hpc", "relative")
    files = [
        site_file(SMALLEST, "tu-hpc", str(Path.home() / ".config" / "hpcjobs" / "site_configs")),
        site_file(SMALLEST, "tu-hpc", str(first)),
        site_file(SMALLEST, "tu-hpc", str(second)),
        site_file(SMALLEST, "tu-hpc", str(tmp_path / "xdg" / "hpcjobs" / "site_configs")),
        data_folder("site_configs") / "tu-hpc.yaml",
    ]
    entries = [entry for entry in list_sites() if entry.name == "tu-hpc"]
    assert [entry.path for entry in entries] == files
    assert [entry.layer for entry in entries] == ["user", "centre", "centre", "centre", "example"]
    for path in files[:-1]:
        assert load_site("tu-hpc").path == str(path)
        path.unlink()


def test_the_site_of_this_cluster_is_chosen_from_the_centres_files(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=big\n")
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_CONF", str(conf))
    monkeypatch.setenv("HPCJOBS_SITE_PATH", str(tmp_path / "centre"))
    site_file(SMALLEST + "cluster: small\n", "a", str(tmp_path / "centre"))
    path = site_file(SMALLEST + "cluster: big\n", "b", str(tmp_path / "centre"))
    assert find_default_site() == str(path)


@pytest.mark.parametrize("line", ['clustername="big"', "ClusterName=big# the large one", " ClusterName = BIG"])
def test_the_name_of_this_cluster_is_read_as_slurm_reads_it(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    (tmp_path / "slurm.conf").write_text(f"{line}\n")
    assert cluster_name(str(tmp_path / "slurm.conf")) == "big"


@pytest.fixture
def silent(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A login node whose Slurm commands find no controller."""
    text = "#!/bin/sh\necho 'fatal: Could not establish a configuration source' >&2; exit 1\n"
    for name in ("sbatch", "scontrol"):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(machine, "_CONFIGURATIONS", ())
    machine._has_configuration.cache_clear()


@pytest.mark.usefixtures("silent")
def test_a_user_of_a_cluster_is_told_that_jobs_run_on_this_machine_where_slurm_is_silent() -> None:
    assert default_site() == "local"
    path = site_file(SMALLEST, "big", str(config_dir() / "site_configs"))
    with pytest.warns(HpcJobsWarning, match=f"jobs run on this machine itself; is it a login node of {path}"):
        assert default_site() == "local"
    (config_dir() / "config.yaml").write_text("site: local\n")
    assert default_site() == "local"  # a warning would fail the test


def test_a_slurm_conf_that_is_not_there_is_no_reason_to_run_on_this_machine(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "gone.conf"))
    path = site_file(SMALLEST, "big", str(config_dir() / "site_configs"))
    assert find_default_site() == str(path)


def test_several_site_files_of_one_cluster_are_named(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=big\n")
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_CONF", str(conf))
    paths = [site_file(SMALLEST + "cluster: big\n", name, str(config_dir() / "site_configs")) for name in "ab"]
    with pytest.raises(ConfigError, match=f"several site files are for it: {paths[0]}, {paths[1]}\n.*--site NAME"):
        default_site()


@pytest.mark.parametrize("key", ["no", "2026-11-27"])
def test_a_key_that_is_no_text_to_yaml_is_named_with_its_line(here: Path, key: str) -> None:
    site_file(f"partitions:\n  {key}: {{nodes: 1, node: {{cpus: 4}}}}\n", "odd", "x")
    with pytest.raises(ConfigError, match=rf"odd.yaml:2: .*key '{key}' is no text to YAML .*write it in quotes"):
        load_site("x/odd.yaml")


def test_a_site_file_can_be_named_by_its_path(here: Path) -> None:
    path = site_file(SMALLEST, "odd", "elsewhere")
    assert load_site("elsewhere/odd.yaml").name == "odd"
    assert load_site(str(path)).path == str(path)


def test_an_unknown_site_is_answered_with_the_nearest_and_where_was_looked() -> None:
    with pytest.raises(ConfigError) as caught:
        load_site("tu-hcp")
    hint = str(caught.value).partition("hint: ")[2].splitlines()
    assert hint[0] == "did you mean 'tu-hpc'? known:"
    assert hint[1].startswith("  tu-hpc, ")
    assert max(map(len, hint)) <= 80
    assert str(data_folder("site_configs")) in str(caught.value)


def test_the_default_site_is_the_environments_then_the_users_then_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert default_site() == "local"
    config = Path.home() / ".config" / "hpcjobs" / "config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("site: gcp-t4\n")
    assert default_site() == "gcp-t4"
    monkeypatch.setenv("HPCJOBS_SITE", "tu-hpc")
    assert default_site() == "tu-hpc"


def test_a_mistake_in_the_users_own_settings_is_named() -> None:
    config = Path.home() / ".config" / "hpcjobs" / "config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("sites: gcp-t4\n")
    with pytest.raises(ConfigError, match=r"config\.yaml:1: sites: unknown key\nhint: did you mean 'site'"):
        default_site()


def test_a_mistake_in_a_spec_file_is_named(here: Path) -> None:
    Path("job.yaml").write_text("program: [true_]\nresources:\n  node: 4\n")
    with pytest.raises(ConfigError, match=r"job\.yaml:3: resources\.node: unknown key\nhint: did you mean 'nodes'"):
        read_yaml(Path("job.yaml"), JobSpec)
