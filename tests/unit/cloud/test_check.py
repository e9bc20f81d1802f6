"""`hpcjobs cloud check`: what it costs, what is risky, what is missing; asked of nobody."""

from __future__ import annotations

from typing import Any

import pytest
from sites import KEY, PROVIDERS, saved, sized, tree

from hpcjobs.cloud.check import Report, check, problems
from hpcjobs.cloud.render import render
from hpcjobs.cloud.section import resolve_cluster
from hpcjobs.errors import HpcJobsError


def report(site: dict[str, Any], **changed: str) -> Report:
    cluster = resolve_cluster(saved(site))
    return check(cluster, render(cluster) | changed)


def texts(result: Report, level: str) -> dict[str, str]:
    return {f.about: f.text for f in result.findings if f.level == level}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_complete_site_has_no_errors_and_no_warnings(provider: str) -> None:
    result = report(sized(provider, nodes=2))
    assert [f for f in result.findings if f.level != "note"] == []
    assert not result.failed


def test_the_estimate_is_of_the_sites_own_prices() -> None:
    site = sized("gcp", nodes=4) | {"prices": {"node_hour": 0.5, "gpu_hour": 0.25, "currency": "USD"}}
    cost = report(site).estimate
    assert (cost.per_hour, cost.currency) == (4 * (0.5 + 0.25) + 0.13, "USD")
    assert "traffic" in cost.left_out
    assert report(sized("gcp", nodes=4) | {"prices": {}}).estimate.per_hour is None


def test_a_budget_that_does_not_reach_is_an_error() -> None:
    site = sized("gcp", nodes=2)
    site["cloud"]["budget"] = {"amount": 10, "hours": 20}
    assert texts(report(site), "error")["budget"] == "20 hours cost about 31.80 USD, the budget is 10"
    site["cloud"]["budget"]["amount"] = 40
    assert not report(site).failed


@pytest.mark.parametrize(
    ("quota", "settings"),
    [
        ({"cpus": 19}, "20 CPUs are needed, the site's quota says 19"),
        ({"gpus": 1}, "2 GPUs are needed, the site's quota says 1"),
        ({"disk": "499G"}, "500 GiB of disks are needed, the site's quota says 499"),
    ],
)
def test_more_than_the_quota_is_an_error(quota: dict[str, Any], settings: str) -> None:
    site = tree("gcp")
    site["cloud"]["quota"] = quota
    assert texts(report(site), "error")["quota"] == settings


def test_what_is_risky_is_said() -> None:
    site = tree("gcp")
    site["cloud"]["network"] |= {"ssh_from": ["0.0.0.0/0"], "open_to_world": True}
    site["cloud"] |= {"secure_boot": False, "scopes": ["cloud-platform"]}
    warned = texts(report(site), "warning")
    assert set(warned) == {"ssh", "shielded VM", "identity"}


def test_what_is_unsaid_is_said() -> None:
    site = tree("gcp")
    del site["cloud"]["project"], site["cloud"]["ssh"], site["cloud"]["network"]
    assert set(texts(report(site), "warning")) == {"project", "ssh.keys", "network.ssh_from"}


@pytest.mark.parametrize(
    "secret",
    ["-----BEGIN OPENSSH PRIVATE KEY-----", '"private_key": "x"', "AKIA" + "A" * 16, "hf_" + "a" * 34],
)
def test_a_secret_in_a_file_is_an_error_that_does_not_repeat_it(secret: str) -> None:
    result = report(tree("gcp"), **{"extra.tfvars": f"# mine\nx = {secret}\n"})
    assert texts(result, "error") == {
        "secrets": "extra.tfvars:2 looks like a key or token; it would stand in the state"
    }
    assert secret not in str(result)


def test_a_public_key_is_no_secret() -> None:
    site = tree("nebius")
    site["cloud"]["ssh"]["keys"] = [KEY]
    assert not report(site).failed


def test_a_provider_without_a_schema_is_named_and_how_to_write_it() -> None:
    with pytest.raises(HpcJobsError, match=r"newcloud\.json: missing") as error:
        problems({}, "newcloud")  # type: ignore[arg-type]
    assert "tools/provider-schemas" in str(error.value.hint)
