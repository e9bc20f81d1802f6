"""sacct of several versions, as far as their outputs differ, beside the recorded ones.

Constructed: the columns are those each version documents.

- 20.11: ReqMem says per CPU (``c``) or node (``n``) and is not raw; Planned is called Reserved.
- 21.08, 23.02: as 22.05 for the columns asked for.
- 24.11, 25.05: Restarts is new; GPU use in TRESUsageIn* where AcctGather is on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpcjobs.jobstats.columns import SACCT_COLUMNS
from hpcjobs.processes.programs import Result

DATA = Path(__file__).parents[2] / "data" / "sacct"
SEPARATOR = "\x1f\x02\x1d\x07"
BEGUN = 1_795_000_000


def row(**values: str | int) -> dict[str, str]:
    """A row of a job that ran for an hour on one node of 8 CPUs; ``values`` replace or add columns."""
    usual = {
        "JobID": "7", "JobIDRaw": "7", "JobName": "train", "User": "ana", "Account": "lab", "Partition": "compute",
        "QOS": "normal", "State": "COMPLETED", "ExitCode": "0:0", "Reason": "None", "Submit": BEGUN,
        "Eligible": BEGUN, "Start": BEGUN + 60, "End": BEGUN + 3660, "ElapsedRaw": 3600, "TimelimitRaw": 120,
        "NNodes": 1, "NTasks": "", "NCPUS": 8, "ReqMem": "16384M", "ReqTRES": "cpu=8,mem=16384M,node=1",
        "AllocTRES": "billing=8,cpu=8,mem=16384M,node=1", "NodeList": "n1", "TotalCPU": "04:00:00", "MaxRSS": "",
        "AveRSS": "", "TRESUsageInTot": "", "TRESUsageInAve": "", "ConsumedEnergyRaw": "0", "Restarts": "0",
    }  # fmt: skip
    return {key: str(value) for key, value in {**usual, **values}.items()}


def step(of: Mapping[str, str], suffix: str = "0", **values: str | int) -> dict[str, str]:
    """A step of that job: four tasks of 1 GiB each."""
    gib = 1 << 30
    empty = dict.fromkeys(("User", "Partition", "QOS", "TimelimitRaw", "ReqMem", "ReqTRES", "Reason"), "")
    own: dict[str, str | int] = {
        "JobID": f"{of['JobID']}.{suffix}", "JobIDRaw": f"{of['JobIDRaw']}.{suffix}", "JobName": "python", "NTasks": 4,
        "MaxRSS": gib, "AveRSS": gib, "TRESUsageInTot": f"cpu=04:00:00,energy=0,mem={4 * gib},pages=0,vmem=0",
    }  # fmt: skip
    return {**of, **empty, **{key: str(value) for key, value in {**own, **values}.items()}}


def printed(rows: Sequence[Mapping[str, str]], columns: Sequence[str], separator: str) -> bytes:
    """As sacct prints them."""
    return b"".join(separator.join(one[name] for name in columns).encode() + b"\n" for one in rows)


class FakeSacct:
    """Answers like sacct; remembers what it was asked."""

    def __init__(self, rows: Sequence[Mapping[str, str]] = (), *, lacks: Sequence[str] = (), cut: int = 0) -> None:
        self.rows, self.cut = rows, cut
        self.columns = tuple(name for name in (*SACCT_COLUMNS, "Restarts", "Layout") if name not in lacks)
        self.queries: list[Sequence[str]] = []

    def run(self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> Result:
        return Result(0, "  ".join(self.columns), "")

    def stream(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Iterator[bytes]:
        self.queries.append(argv)
        output = {argument.partition("=")[0]: argument.partition("=")[2] for argument in argv}
        out = printed(self.rows, output["--format"].split(","), output["--delimiter"])
        out = out[: len(out) - self.cut]
        yield from (out[at : at + 1000] for at in range(0, len(out), 1000))
