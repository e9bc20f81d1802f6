"""A site file on top of another: what it says, where it was read, and what is wrong with which of the files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from commandline import ok, within
from site_folders import user_folder, write_site

from hpcjobs import load_site
from hpcjobs.errors import ConfigError
from hpcjobs.site.library import find_default_site

CENTRE = """\
cluster: big
partitions:
  main:
    nodes: 8
    node: {cpus: 64, mem: 256G}
    max_time: 2-00:00:00
modules: [openmpi/4.1]
env: {OMP_PROC_BIND: close, UCX_TLS: all}
environment: {venv: /opt/centre}
setup: ["ulimit -l unlimited"]
"""


@pytest.fixture
def centre(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The centre's folder of site files, with one in it."""
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "xdg"))
    return write_site(tmp_path / "xdg" / "hpcjobs" / "site_configs", "big", CENTRE)


def refusal(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_site(name)
    return str(caught.value)


def test_mappings_are_merged_key_by_key_and_any_other_value_replaces_the_parents(centre: Path) -> None:
    write_site(
        user_folder(),
        "mine",
        "extends: big\nenvironment: {venv: null, conda: train}\nmodules: []\nenv: {UCX_TLS: rc}\n"
        "partitions: {main: {max_time: 1h}}\n",
    )
    site = load_site("mine")
    assert (site.name, site.cluster, site.extended) == ("mine", "big", (str(centre),))
    assert (site.environment.conda, site.environment.venv) == ("train", None)
    assert site.modules == ()
    assert site.env == {"OMP_PROC_BIND": "close", "UCX_TLS": "rc"}
    assert site.setup == ("ulimit -l unlimited",)
    assert (site.partitions["main"].max_time, site.partitions["main"].node_count) == ("01:00:00", 8)


def test_an_environment_of_ones_own_is_three_lines_in_the_script_of_a_job(centre: Path) -> None:
    write_site(user_folder(), "mine", "extends: big\nenvironment:\n  {conda: train, venv: null}\n")
    script = ok("submit", "--site", "mine", "--dry-run", "true").out
    assert "conda activate train" in script
    assert "module load openmpi/4.1" in script
    assert "/opt/centre" not in script


def test_a_file_may_extend_the_one_that_it_shadows_layer_by_layer(centre: Path) -> None:
    users = write_site(user_folder(), "big", "extends: big\nmpi: pmix\n")
    project = write_site(Path("site_configs").absolute(), "big", "extends: big\ndescription: of a project\n")
    with pytest.warns(UserWarning, match="which shadows"):
        site = load_site("big")
    assert (site.path, site.extended) == (str(project), (str(users), str(centre)))
    assert (site.mpi, site.description, site.cluster) == ("pmix", "of a project", "big")


def test_a_users_file_never_extends_a_projects_one(centre: Path) -> None:
    write_site(user_folder(), "mine", "extends: base\n")
    write_site(Path("site_configs").absolute(), "base", CENTRE)
    message = refusal("mine")
    assert "mine.yaml:1: extends: no site 'base'; looked in" in message
    assert re.search(r"\bbig, .*gcp-t4, .*lumi\b", message, re.DOTALL), "what could be extended is named"
    assert str(Path("site_configs").absolute()) not in message


def test_files_that_extend_each_other_are_refused_with_the_circle(centre: Path) -> None:
    for name, other in (("a", "b"), ("b", "c"), ("c", "a")):
        write_site(user_folder(), name, f"# {name}\nextends: {other}\n")
    message = refusal("a")
    assert "c.yaml:2: extends: the files extend each other: " in message
    assert "a.yaml -> " in message.partition("other: ")[2]


@pytest.mark.parametrize("name", ["../big", "", "-x", "a/b"])
def test_a_parent_is_named_and_not_a_path(centre: Path, name: str) -> None:
    write_site(user_folder(), "mine", f'mpi: pmix\nextends: "{name}"\n')
    assert "mine.yaml:2: extends: " in refusal("mine")


@pytest.mark.parametrize(
    ("child", "parent", "place"),
    [
        ("extends: big\npartitions: {main: {nodes: many}}\n", "", "mine.yaml:2: partitions.main.nodes: "),
        ("extends: big\nmpi: pmix\n", "partitons: {}\n", "big.yaml:11: partitons: unknown key"),
        ("extends: big\nmpi: pmix\n", "qos: {normal: banana}\n", "big.yaml:11: qos.normal: "),
        ("extends: big\nenvironment:\n  conda: train\n", "", "mine.yaml:2: environment: use conda or venv, not both"),
        ("extends: big\nmpi: pmix\n", "prices:\n  cpu_hour: [1]\n", "big.yaml:12: prices.cpu_hour: "),
        ("extends: [big]\n", "", "mine.yaml:1: extends: expected text"),
    ],
)
def test_a_mistake_is_named_with_the_file_and_line_that_has_it(
    centre: Path, child: str, parent: str, place: str
) -> None:
    centre.write_text(CENTRE + parent)
    write_site(user_folder(), "mine", child)
    assert place in refusal("mine")


def test_a_parent_needs_to_be_no_complete_site(centre: Path) -> None:
    write_site(centre.parent, "base", "modules: [gcc]\n")
    write_site(centre.parent, "small", "extends: base\npartitions: {main: {nodes: 2, node: {cpus: 4}}}\n")
    assert load_site("small").modules == ("gcc",)
    assert "base" in ok("sites").out


def test_show_prints_the_file_and_line_of_each_key_and_is_a_site_file_again(centre: Path, here: Path) -> None:
    mine = write_site(user_folder(), "mine", "extends: big\nenvironment: {venv: null, conda: train}\n")
    shown = ok("sites", "show", "mine").out
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert f"# extends {centre}" in lines
    assert f"conda: train # {mine}:2" in lines
    assert f"venv: null # {mine}:2" in lines
    assert f"max_time: 2-00:00:00 # {centre}:6" in lines
    assert f"UCX_TLS: all # {centre}:8" in lines
    assert "interface: null" in lines, "a default names no file"
    (here / "again.yaml").write_text(shown)
    again, first = (yaml.safe_load(ok("sites", "show", name).out) for name in ("./again.yaml", "mine"))
    assert again == first


def test_the_list_names_each_layer_and_what_shadows_what_with_the_examples_apart(centre: Path, here: Path) -> None:
    mine = write_site(user_folder(), "big", "extends: big\n")
    own, _, examples = ok("sites").out.partition("EXAMPLE")
    assert [line.split()[:1] for line in own.splitlines() if "big" in line] == [["big"], ["big"]]
    assert f"{centre} (shadowed by {mine})" in own
    assert "tu-hpc" in examples
    assert "tu-hpc" not in own
    rows = {row["path"]: row for row in ok("sites", "--json").json}
    assert rows[str(mine)]["extends"] == [str(centre)]
    assert rows[str(mine)]["shadowed_by"] is None
    assert rows[str(centre)]["shadowed_by"] == str(mine)


def test_a_file_of_the_current_folder_that_shadows_another_is_named_each_time(centre: Path, here: Path) -> None:
    project = write_site(here / "site_configs", "big", "extends: big\n")
    for _ in range(2):
        answer = within("submit", "--site", "big", "--dry-run", "true")
        assert answer.err.count(f"site big is {project}, which shadows {centre}") == 1, answer


def test_where_no_site_is_named_the_users_extension_of_the_centres_file_is_chosen_and_a_projects_one_is_not(
    centre: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=big\n")
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    write_site(here / "site_configs", "cloned", CENTRE)
    assert find_default_site() == str(centre)
    mine = write_site(user_folder(), "mine", "extends: big\n")
    assert find_default_site() == str(mine)
    write_site(user_folder(), "second", "extends: big\n")
    assert find_default_site() is None
