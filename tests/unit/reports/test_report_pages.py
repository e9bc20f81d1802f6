"""Pages of reports: one design, legible in wide and narrow windows, without network; `report jobs --page`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from commandline import ok, within
from sacct_rows import simulated_rows
from scripted_cluster import ScriptedCluster

from hpcjobs.jobstats.pages import choose_intervals, mean_over_intervals
from hpcjobs.pages import PageTable, Picture, Section, figures, render

CHROMIUM = Path("/usr/bin/chromium")
LEVEL_TEXTS = """[...document.querySelectorAll('svg text')].filter(text => !text.outerHTML.includes('rotate(-90'))
    .map(text => text.getBoundingClientRect().height)"""


@pytest.fixture
def page(cluster: ScriptedCluster) -> Path:
    """The page of a busy week."""
    rows = simulated_rows(3, jobs=120)
    for row in rows:
        number = int(row["JobID"].partition(".")[0])
        row.update(Account=f"lab{number % 2}", User=f"user{number % 9}" if row["User"] else "")
    cluster.account(rows)
    out = ok("report", "jobs", "-a", "--since", "6d", "--page", "week").out
    assert out == "page week/index.html\n"
    return Path("week")


def test_the_page_of_jobs_has_use_waits_and_wastes_with_tables_and_facts(page: Path) -> None:
    text = (page / "index.html").read_text(encoding="utf-8")
    titles = ("CPUs in use over time", "GPUs in use over time", "Jobs waiting over time", "Waits")
    for title in (*titles, "CPU hours without work"):
        assert f"<h2>{title}</h2>" in text
    for group in ("user", "account", "state"):
        assert (page / f"use-by-{group}.svg").is_file()
    assert "All of it: partition gpu" in text
    assert text.count("<svg") == text.count("<details>") == len(list(page.glob("*.png")))
    for fact in ("period", "site", "partitions", "users", "interval", "source", "written"):
        assert f"<dt>{fact}</dt>" in text
    assert "gpu: 8 nodes of 64 CPUs, 512G, 4 GPUs" in text
    assert "--time=" in text
    assert len(pl.read_parquet(page / "jobs.parquet")) == 120


def test_the_area_of_a_picture_is_the_time_that_jobs_held(page: Path, cluster: ScriptedCluster) -> None:
    """Sums of the intervals times their length, against the sum over the rows of sacct."""
    rows = pl.read_csv(_table(page, "CPUs in use, by user"), infer_schema_length=None)
    length = {edge - begin for begin, edge in pairwise(_moments(rows["from"]))}
    assert len(length) == 1
    hours = sum(float(value) for name in rows.columns[1:] for value in rows[name]) * length.pop() / 3600
    jobs = [row for row in cluster.accounted() if "." not in row["JobID"]]
    held = sum(int(row["NCPUS"]) * (int(row["End"]) - int(row["Start"])) for row in jobs) / 3600
    assert hours == pytest.approx(held, rel=0.01)


def _moments(texts: pl.Series) -> list[float]:
    return [time.mktime(time.strptime(text, "%Y-%m-%d %H:%M")) for text in texts]


def _table(page: Path, title: str) -> bytes:
    """The table behind a picture, as CSV."""
    text = (page / "index.html").read_text(encoding="utf-8")
    figure = text[text.index(f"<h3>{title}</h3>") :].partition("</figure>")[0]
    lines = [re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", line) for line in figure.splitlines() if "<tr>" in line]
    return "\n".join(",".join(cell.replace(",", "") for cell in line) for line in lines).encode()


def test_means_of_intervals_are_those_of_a_sum_over_seconds() -> None:
    chance = np.random.default_rng(5)
    begins = chance.integers(0, 7000, 40)
    jobs = pl.DataFrame({"a": begins, "b": begins + chance.integers(1, 4000, 40), "w": chance.integers(1, 9, 40)})
    intervals = choose_intervals(0, 7200)._replace(begin=0, length_s=900, number=8)
    held = np.zeros(12000)
    for begin, end, weight in jobs.rows():
        held[begin:end] += weight
    expected = [held[900 * n : 900 * (n + 1)].mean() for n in range(8)]
    assert mean_over_intervals(jobs, intervals, "a", "b", "w") == pytest.approx(expected)


@pytest.mark.parametrize(("days", "length"), [(0.5, 900), (2, 3600), (7, 3 * 3600), (30, 12 * 3600), (60, 86400)])
def test_a_period_has_at_most_sixty_intervals_from_midnight_on(days: float, length: int) -> None:
    now = time.time()
    intervals = choose_intervals(now - days * 86400, now)
    assert intervals.length_s == length
    assert intervals.number <= 61
    assert intervals.begin <= now - days * 86400
    assert intervals.edges[-1] >= now


@pytest.fixture
def design(tmp_path: Path) -> Path:
    """A page with each part: facts, a warning, a picture with a legend and a table, a wide table of long texts."""
    figure, axes = figures.new_figure()
    for number in range(7):
        axes.plot([1, 2, 3], [number, 2, 3], label=f"node{number:02}.cluster.example")
    axes.set(xlabel="nodes", ylabel="images per second")
    figures.add_legend(figure)
    cells = ["1,234.5 (1,200 to 1,250)"] * 12
    folder = f"/scratch/project/{'long-name' * 9}"
    headers = ["job", "node", "folder", *(f"column {n}" for n in range(12))]
    wide = PageTable(headers, [[f"10{n}", "n1", f"{folder}/{n}", *cells] for n in range(9)], "A note.")
    behind = PageTable(["nodes", "images/s"], [["1", "10.0"], ["2", "19.5"]])
    text = render(
        title="Everything", lead="a page", facts={"site": "mine", "partition": "gpu", "image": None},
        warnings=["Careful."],
        sections=[Section("Lines", ["One."], wide, [Picture("Rate", "Images/s.", figures.to_svg(figure), behind)] * 2)],
    )  # fmt: skip
    (tmp_path / "index.html").write_text(text, encoding="utf-8")
    return tmp_path / "index.html"


@pytest.fixture
def browser() -> Iterator[Any]:
    if not CHROMIUM.exists():
        pytest.skip("needs Chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu"])


def test_a_page_fits_wide_and_narrow_windows_light_and_dark_and_asks_the_network_for_nothing(
    browser: Any, design: Path
) -> None:
    inks = {}
    for width in (1400, 800, 400):
        for scheme in ("light", "dark"):
            window = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            requests: list[str] = []
            window.on("request", lambda request, requests=requests: requests.append(request.url))
            window.goto(design.as_uri())
            assert requests == [design.as_uri()]
            assert window.evaluate("document.documentElement.scrollWidth") == width
            heights = window.evaluate(LEVEL_TEXTS)
            assert min(heights) >= 10, (width, scheme)
            assert max(heights) < window.evaluate("document.querySelector('h1').getBoundingClientRect().height")
            inks[scheme] = window.evaluate("getComputedStyle(document.querySelector('svg text')).fill")
            window.close()
    assert inks["light"] != inks["dark"]


def test_a_legend_lies_outside_the_axes(browser: Any, design: Path) -> None:
    window = browser.new_page(viewport={"width": 1400, "height": 900})
    window.goto(design.as_uri())
    box = "document.querySelector('{}').getBoundingClientRect()"
    assert window.evaluate(f"{box.format('#legend_1')}.top >= {box.format('#patch_2')}.bottom")


def test_a_printed_page_has_the_tables_behind_its_pictures(browser: Any, design: Path) -> None:
    window = browser.new_page(color_scheme="dark")
    window.goto(design.as_uri())
    window.emulate_media(media="print")
    assert window.locator("details td").first.evaluate("cell => cell.getBoundingClientRect().height") > 0
    assert window.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_options_that_a_page_has_no_place_for_are_refused(cluster: ScriptedCluster) -> None:
    for more in (("--watch",), ("--by", "user")):
        answer = within("report", "jobs", "--page", "week", *more)
        assert answer.code != 0
        assert more[0] in answer.err
    assert not Path("week").exists()
