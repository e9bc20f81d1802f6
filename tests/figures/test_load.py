"""The figures of ``report load``, from the samples of the monitor."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from commandline import ok
from scripted_cluster import read_table


def test_the_load_of_a_node_is_the_mean_and_the_peak_of_its_samples(tmp_path: Path) -> None:
    chance = np.random.default_rng(3)
    folder = tmp_path / "samples"
    folder.mkdir()
    expected = {}
    for node, (name, host) in enumerate((("monitor", "n1"), ("monitor-1", "n2"), ("monitor-2", "n3"))):
        frame = pd.DataFrame(
            {
                "kind": "sample",
                "time_s": np.arange(1.0, 41 + node),
                "cpu_percent": chance.uniform(0, 100, 40 + node),
                "gpu_percent": chance.uniform(0, 100, 40 + node),
                "rss_bytes": chance.integers(1 << 28, 9 << 30, 40 + node),
            }
        )
        head = {"kind": "monitor", "schema": "hpcjobs.monitor/1", "host": host, "interval_s": 1.0, "started_at": 1e9}
        lines = [json.dumps(head), *frame.to_json(orient="records", lines=True).split()]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        expected[host] = frame
    rows = read_table(ok("report", "load", str(folder)).out.partition("page ")[0], "NODE")
    assert [row["NODE"] for row in rows] == list(expected)
    for row in rows:
        frame = expected[row["NODE"]]
        assert int(row["SAMPLES"]) == len(frame)
        assert float(row["GPU"].removesuffix(" %")) == pytest.approx(frame["gpu_percent"].mean(), abs=0.5)
        assert float(row["CPU"].removesuffix(" %")) == pytest.approx(frame["cpu_percent"].mean(), abs=0.5)
        assert float(row["MEMORY"].removesuffix(" GiB")) == pytest.approx(frame["rss_bytes"].max() / 2**30, abs=0.005)
