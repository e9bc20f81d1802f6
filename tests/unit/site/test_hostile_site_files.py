"""Whatever stands in a site file, loading it gives a site or an error that names file and line, within a second."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from commandline import within

from hpcjobs import load_site
from hpcjobs.errors import ConfigError

SITE = "partitions: {main: {nodes: 2, node: {cpus: 4}}}\n"


def doubling(rounds: int, *, how: str) -> str:
    """Anchors of which each stands for twice the one before; ``how`` is what becomes of two of them."""
    lines = ["x0: &x0 {k: v}"]
    lines += [f"x{n}: &x{n} {how.format(before=f'*x{n - 1}')}" for n in range(1, rounds)]
    return "\n".join(lines) + "\n"


MERGED = "{{<<: [{before}, {before}], k: w}}"
LONG_MERGE = "x: &x {" + ", ".join(f"k{n}: v" for n in range(2000)) + "}\ny: {<<: [" + "*x, " * 3000 + "*x]}\n"

HOSTILE = {
    "list as a key": "? [a, b]\n: c\n",
    "mapping as a key": "env: {? {a: b} : c}\n",
    "list as a key, flow": "env:\n  {[1, 2]: c}\n",
    "impossible date": SITE + "description: 2026-13-45\n",
    "impossible time": SITE + "description: 2026-11-22T99:00:00\n",
    "tag without a number": SITE + "max_submit_jobs: !!int abc\n",
    "tag with nothing": SITE + "max_submit_jobs: !!int ''\n",
    "float tag": SITE + "prices: {cpu_hour: !!float abc}\n",
    "bool tag": SITE + "containers: {home: !!bool maybe}\n",
    "timestamp tag": SITE + "description: !!timestamp soon\n",
    "half a binary number": SITE + "max_submit_jobs: 0b_\n",
    "5,000 digits": SITE + f"max_submit_jobs: {'9' * 5000}\n",
    "5,000 digits of nodes": f"partitions: {{main: {{nodes: {'9' * 5000}, node: {{cpus: 4}}}}}}\n",
    "400 digits": f"partitions: {{main: {{nodes: {'9' * 400}, node: {{cpus: 4}}}}}}\n",
    "5,000 digits of memory": f"partitions: {{main: {{nodes: 1, node: {{cpus: 4, mem: {'9' * 5000}G}}}}}}\n",
    "NUL": SITE + 'run_root: "a\\0b"\n',
    "NUL in a key": SITE + 'env: {"a\\0b": c}\n',
    "half a character": SITE + 'description: "\\ud800"\n',
    "raw control character": SITE + "description: a\x07b\n",
    "object of Python": SITE + "description: !!python/object/apply:os.system [true]\n",
    "unknown tag": SITE + "description: !secret x\n",
    "unknown anchor": SITE + "env: *nobody\n",
    "anchor in itself": "x: &x [*x]\n" + SITE,
    "anchor merged into itself": "x: &x {<<: *x}\n" + SITE,
    "deep lists": "x: " + "[" * 30_000 + "\n",
    "deep mappings": "x: " + "{a: " * 30_000 + "\n",
    "deep blocks": "".join(f"{' ' * n}a:\n" for n in range(1500)),
    "lists that double": doubling(60, how="[{before}, {before}]") + SITE,
    "merges that double": doubling(60, how=MERGED) + SITE,
    "list of merges": LONG_MERGE + SITE,
    "merge of a word": SITE + "env: {<<: word}\n",
    "two documents": SITE + "---\n" + SITE,
    "numbers as keys": SITE + "1: 2\n",
    "null as a key": SITE + "env: {null: a}\n",
    "true as a key": SITE + "env: {yes: a}\n",
    "megabytes": SITE + "# " + "x" * 3_000_000 + "\n",
    "binary": SITE + "description: !!binary aGVsbG8=\n",
    "set": SITE + "modules: !!set {a, b}\n",
    "date for text": SITE + "description: 2026-11-22\n",
    "infinite price": SITE + "prices: {cpu_hour: .inf}\n",
    "no price": SITE + "prices: {cpu_hour: .nan}\n",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_with_file_and_line_within_a_second(case: str) -> None:
    Path("mine.yaml").write_text(HOSTILE[case], encoding="utf-8")
    started = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load_site("./mine.yaml")
    assert time.process_time() - started < 1
    message = str(caught.value)
    assert "mine.yaml" in message
    assert "mine.yaml:" in message
    assert len(message) < 2000


def test_the_list_of_sites_names_what_is_wrong_with_each_hostile_file_and_shows_the_others() -> None:
    folder = Path("site_configs")
    folder.mkdir()
    for number, text in enumerate(HOSTILE.values()):
        (folder / f"hostile{number}.yaml").write_text(text, encoding="utf-8")
    (folder / "good.yaml").write_text(SITE + "description: a good one\n", encoding="utf-8")
    (folder / "folder.yaml").mkdir()
    answer = within("sites")
    assert answer.code == 0
    assert "a good one" in answer.out
    lines = [line for line in answer.out.splitlines() if line.startswith(("hostile", "folder"))]
    assert len(lines) == len(HOSTILE) + 1
    assert all("broken: " in line for line in lines)


def test_a_number_with_a_leading_zero_is_refused_in_every_file() -> None:
    Path("mine.yaml").write_text("partitions: {main: {nodes: 010, node: {cpus: 4}}}\n", encoding="utf-8")
    Path("job.yaml").write_text("nodes: 010\n", encoding="utf-8")
    Path("study.yaml").write_text("parameters: {lr: [1, 010]}\n", encoding="utf-8")
    for arguments in (
        ["submit", "--site", "./mine.yaml", "true"],
        ["submit", "--site", "local", "--spec", "job.yaml", "true"],
        ["sweep", "--site", "local", "--sweep", "study.yaml", "--dry-run", "true"],
    ):
        answer = within(*arguments)
        assert (answer.code, "'010' is octal to YAML, 8" in answer.err) == (4, True), answer


VALUES = [
    ("retries: two", "retries", "'two' is neither on, off nor a cause"),
    ("retries: node=-1", "retries", "neither a number nor"),
    ("signal_before: 5 minutes", "signal_before", "90m"),
    ("qos: {normal: banana}", "qos.normal", "banana"),
    ("qos: {normal: 12}", "qos", "expected text"),
    ("default_qos: gone\nqos: {normal: 1h}", "default_qos", "known: normal"),
    ("launchers: [srun, srum]", "launchers", "srum"),
    ("launchers: []", "launchers", "at least one"),
    ("directives: {account: 'wckey={user}'}", "directives.account", "{value}"),
    ('directives: {account: "a\\nb"}', "directives.account", "control characters"),
    ('sbatch: ["a\\nb"]', "sbatch", "control characters"),
    ("sbatch: [exclusive --partition=secret]", "sbatch", "one long option"),
    ("directives: {comment: '{value}'}", "directives.comment", "one long option"),
    ("directives: {comment: 'exclusive --partition={value}'}", "directives.comment", "one long option"),
    ("max_submit_jobs: 0", "max_submit_jobs", "positive"),
    ("prices: {cpu_hour: -1}", "prices", "negative"),
    ("watts: {gpu: .inf}", "watts", "number"),
    ('run_root: "a\\nb"', "run_root", "control characters"),
    ('mpi: "pmix\\n"', "mpi", "control characters"),
    ("env: {A-B: c}", "env", "A-B"),
    ("jupyter: {idle: never}", "jupyter.idle", "never"),
    ("defaults: {gpus_per_node: v100}", "defaults.gpus_per_node", "v100:4"),
    ("defaults: {nodes: 4-2}", "defaults.nodes", "2-4"),
    ("defaults: {time: forever}", "defaults.time", "UNLIMITED"),
    ("defaults: {cpus_per_task: 99999999999}", "defaults.cpus_per_task", "at most"),
]
NODES = [
    ("nodes: 0, node: {cpus: 4}", "nodes", "positive"),
    ("nodes: 2", "", "node"),
    ("nodes: 2, node: {cpus: 0}", "node.cpus", "positive"),
    ("nodes: 2, node: {cpus: 4, gpus: -1}", "node.gpus", "negative"),
    ("nodes: 2, node: {cpus: 4, gpu_model: 'a 100'}", "node.gpu_model", "letters"),
    ("nodes: 2, node: {cpus: 4, mem: 64}", "node.mem", "64G"),
    ("nodes: 2, node: {cpus: 4, mem: 192000+}", "node.mem", "+"),
    ("nodes: 2, node: {cpus: 4, features: ['a b']}", "node.features", "letters"),
    ("nodes: []", "nodes", "at least one"),
    ("nodes: [{cpus: 4}]", "nodes.0", "count"),
    ("nodes: [{count: 0, cpus: 4}]", "nodes.0.count", "positive"),
    ("nodes: [{count: 1, cpus: 4}], node: {cpus: 4}", "", "not both"),
    ("nodes: [{count: 1, cpu: 4}]", "nodes.0.cpu", "did you mean 'cpus'"),
    ("nodes: 2, node: {cpus: 4}, min_nodes: 3, max_nodes: 2", "min_nodes", "max_nodes"),
    ("nodes: 2, node: {cpus: 4}, max_nodes: 0", "max_nodes", "positive"),
    ("nodes: 2, node: {cpus: 4}, max_time: soon", "max_time", "soon"),
    ("nodes: 2, node: {cpus: 4}, grace: soon", "grace", "soon"),
    ("nodes: 2, node: {cpus: 4}, max_mem_per_cpu: much", "max_mem_per_cpu", "much"),
    ("nodes: 2, node: {cpus: 4}, preemptible: pause", "preemptible", "suspend"),
]


@pytest.mark.parametrize(("text", "key", "arguments"), VALUES)
def test_every_value_is_checked_when_the_file_is_loaded(text: str, key: str, arguments: str) -> None:
    Path("mine.yaml").write_text(SITE + text + "\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_site("./mine.yaml")
    assert f"mine.yaml:2: {key}" in str(caught.value)
    assert arguments in str(caught.value)


@pytest.mark.parametrize(("text", "key", "arguments"), NODES)
def test_every_value_of_a_partition_is_checked_when_the_file_is_loaded(text: str, key: str, arguments: str) -> None:
    Path("mine.yaml").write_text(f"qos: {{normal: 1h}}\npartitions:\n  main: {{{text}}}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_site("./mine.yaml")
    assert f"mine.yaml:3: partitions.main{'.' if key else ''}{key}" in str(caught.value)
    assert arguments in str(caught.value)


def test_anchors_and_merges_of_a_sensible_size_are_read() -> None:
    Path("mine.yaml").write_text(
        "partitions:\n  a: &a {nodes: 2, node: &node {cpus: 4, mem: 8G}}\n  b: {<<: *a, nodes: 3}\n"
        "  c: {nodes: 1, node: {<<: *node, gpus: 1}}\n",
        encoding="utf-8",
    )
    partitions = load_site("./mine.yaml").partitions
    assert partitions["b"].nodes == 3
    assert partitions["c"].node is not None
    assert (partitions["c"].node.mem, partitions["c"].node.gpus) == ("8G", 1)
