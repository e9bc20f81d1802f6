"""Rows of squeue's and sacct's answers: values by the name of their column, in the order of the tables of parse.py."""

from __future__ import annotations

import time
from collections.abc import Mapping

from hpcjobs.scheduler.slurm.parse import ACCOUNTED, QUEUED, Table

_JOB = {"JobID": 7, "JobName": "job", "Reason": "None", "Partition": "main", "NodeList": "n1", "NNodes": 1}


def queued_row(**values: object) -> str:
    """A row of squeue: job 7 runs since now, unless ``values`` differ. Columns that nobody names are empty."""
    begin = values.get("Submit", int(time.time()))
    usual = {"State": "RUNNING", "Submit": begin, "Start": begin, "Elapsed": "0:09", "TimeLimit": "1:00:00"}
    if values.get("State") == "PENDING":
        usual |= {"NodeList": "", "Start": "N/A", "Elapsed": "0:00"}
    return _row(QUEUED, _JOB | usual | {"Command": "x"} | values)


def accounted_row(table: Table = ACCOUNTED, /, **values: object) -> str:
    """A row of sacct: job 7 has completed just now, unless ``values`` differ. Columns that nobody names are empty."""
    begin = values.get("Submit", int(time.time()))
    usual = {"State": "COMPLETED", "Submit": begin, "Start": begin, "End": begin, "ElapsedRaw": 2, "ExitCode": "0:0"}
    return _row(table, _JOB | usual | values)


def _row(table: Table, values: Mapping[str, object]) -> str:
    if unknown := values.keys() - set(table.columns):
        raise ValueError(f"no columns of the table: {sorted(unknown)}")
    return table.separator.join(str(values.get(column, "")) for column in table.columns)


def print_rows(*rows: str) -> str:
    """A command of the shell that prints the rows; their values may hold ``$variables`` and ``$(commands)``."""
    return 'echo "' + "\n".join(rows) + '"'
