"""Fault tolerance of a job: attempts after its time limit, preemption or a failure, and fewer nodes."""

from __future__ import annotations

from hpcjobs.errors import RequestError
from hpcjobs.job.layers import Values
from hpcjobs.job.models import JobSpec
from hpcjobs.site.models import Site
from hpcjobs.site.resources import node_range
from hpcjobs.site.retries import WARNING_S, Retries, parse_retries
from hpcjobs.units import walltime_s


def resolve_retries(spec: JobSpec, site: Site, values: Values) -> tuple[Retries | None, int | None]:
    """Whether the job is started again, when it gets a signal before its limit, and Slurm's options of both."""
    retries = parse_retries(spec.retries or site.retries or "off")
    signal_before = spec.signal_before or site.signal_before
    signal_before_s = None if signal_before is None else walltime_s(signal_before)
    if retries is not None:
        values.default("requeue", True, "retries")
        # B: the batch shell alone gets it, since node.pyz decides when the ranks are signalled
        values.default("signal", f"B:USR1@{signal_before_s or WARNING_S}", "retries")
    return retries, signal_before_s


def resolve_elastic(spec: JobSpec, values: Values, *, launcher: str, retries: Retries | None) -> None:
    """Whether the job can lose nodes and continue; then Slurm needs ``--no-kill``."""
    if spec.min_nodes is None:
        return
    if launcher != "torchrun":
        raise RequestError(
            f"min_nodes={spec.min_nodes}: launcher {launcher} cannot continue with fewer nodes",
            hint="use --launcher torchrun",
        )
    if retries is None:
        raise RequestError(
            f"min_nodes={spec.min_nodes}: it needs --retries, which the job does not have", hint="add --retries on"
        )
    if spec.min_nodes >= node_range(values["nodes"])[0]:
        raise RequestError(f"min_nodes={spec.min_nodes} must be less than nodes={values['nodes']}")
    values.default("no_kill", True, "min_nodes")
