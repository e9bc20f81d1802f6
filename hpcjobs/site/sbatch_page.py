"""docs/sbatch_options.md: the table of sbatch's options as a page."""

from __future__ import annotations

from hpcjobs.site.resources import OPTIONS, Argument, Sbatch, Treatment

_INTRODUCTION = """\
# sbatch's options

After reading this page you can say what becomes of each option of sbatch.

Every long option of sbatch from Slurm 22.05 to 25.05, and what becomes of it. This page is made from the table in
`hpcjobs/site/resources.py`, and a test compares the table with the sbatch of the machine that runs it.

- own option: `hpcjobs submit` has it by the same name, as have spec files, site files (`defaults`) and Python, with
  underscores.
- passed through: `--sbatch NAME=VALUE` sends it as it is
  ([for people who know sbatch](sbatch.md#what-hpcjobs-does-not-know)).
- refused: with the reason, and what to use. Of a batch script, `--output` and `--error` are left out, and `--export` is
  passed through.

| option | | on the local queue | |
|---|---|---|---|
"""


def page() -> str:
    """The text of the page."""
    return _INTRODUCTION + "".join(map(_row, OPTIONS.values()))


def _row(option: Sbatch) -> str:
    letter = f", `-{option.short}`" if option.short else ""
    equals = (
        "" if option.argument is Argument.NONE else "[=VALUE]" if option.argument is Argument.OPTIONAL else "=VALUE"
    )
    notes = "; ".join(filter(None, (option.versions, option.reason or option.help)))
    local = option.local.value if option.treatment is Treatment.FIELD else ""
    return f"| `--{option.name}{equals}`{letter} | {option.treatment.value} | {local} | {notes} |\n"
