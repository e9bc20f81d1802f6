"""Parameters in the groups that a workload puts them into."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from hpcjobs.runtime.exits import UsageError
from hpcjobs.trainers.workloads.base import ParameterGroup, Workload

GroupedParameters = list[tuple[ParameterGroup, list[nn.Parameter]]]


def group_parameters(named: Iterable[tuple[str, nn.Parameter]], workload: Workload) -> GroupedParameters:
    """The parameters by the group that the workload puts them into, in the order in which the groups occur."""
    groups: dict[ParameterGroup, list[nn.Parameter]] = {}
    for name, parameter in named:
        groups.setdefault(choose_group(name, parameter, workload), []).append(parameter)
    return list(groups.items())


def choose_group(name: str, parameter: nn.Parameter, workload: Workload) -> ParameterGroup:
    group = ParameterGroup() if workload.parameter_group is None else workload.parameter_group(name, parameter)
    if not isinstance(group, ParameterGroup):
        raise UsageError(f"`parameter_group` of the workload returned {group!r} for {name}, not a ParameterGroup")
    return group


def order_names(model: nn.Module, workload: Workload) -> list[str]:
    """The names of a model's parameters in the order in which the optimizer numbers them."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = group_parameters(model.named_parameters(), workload)
    return [names[parameter] for _, parameters in groups for parameter in parameters]
