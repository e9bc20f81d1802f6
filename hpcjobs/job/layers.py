"""Sources of a request: options, spec files, the site and the environment, merged in their order."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import UNSET

from hpcjobs.errors import RequestError, nearest
from hpcjobs.job.models import JobSpec, Layer
from hpcjobs.job.program import program_words
from hpcjobs.site.models import Partition, Resources, Site
from hpcjobs.site.resources import FIELDS, GPU_FIELDS, fields_where, names_by_field
from hpcjobs.site.yaml_file import in_plain_words


def make_spec(program: str | Sequence[str], options: Mapping[str, object]) -> JobSpec:
    """The request to run ``program`` with ``options``: fields of `JobSpec` and of `Resources`, converted and checked.

    None means "not given", except for a field of `Resources`, which it clears.

    Raises RequestError: no such option, or a value that it cannot have.
    """
    env = options.get("env")
    if not isinstance(env, Mapping | None):
        raise RequestError(f"env is a mapping from names to values, not {env!r}")
    own = {name: value for name, value in options.items() if name in JobSpec.__struct_fields__}
    fields = {name: value for name, value in own.items() if value is not None}
    if "chdir" in fields:
        fields["chdir"] = str(fields["chdir"])
    resources = {name: value for name, value in options.items() if name not in own}
    return _convert({**fields, "program": program_words(program), "resources": resources})


def checked_spec(spec: JobSpec) -> JobSpec:
    """``spec`` with every value of its declared type: Python checks none when a `JobSpec` is made.

    Raises RequestError: a value of another type.
    """
    try:
        fields = msgspec.to_builtins(spec)
    except (TypeError, ValueError) as error:
        raise RequestError(f"JobSpec: {error}") from error
    return _convert(fields)


def _convert(fields: Mapping[str, object]) -> JobSpec:
    try:
        return msgspec.convert(fields, JobSpec, strict=False)
    except UnicodeEncodeError as error:  # of msgspec, about to quote a value
        raise RequestError(f"{error.object!r} is not UTF-8 text") from error
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$.")
        field = where.rstrip("`").removeprefix("resources").lstrip(".")
        plain = in_plain_words(message)
        raise RequestError(f"{field}: {plain}" if field else plain, hint=_hint(message, field)) from error


def _hint(message: str, field: str) -> str | None:
    """Return a hint for an unknown option, or for one without its value."""
    if field in Resources.__struct_fields__ and message.endswith("got `bool`"):
        return f"it takes a value: -o {field}=VALUE"
    if message.startswith("Invalid enum value") and field in Resources.__struct_fields__:
        allowed = get_args(get_args(get_type_hints(Resources)[field])[0])
        return f"use {' or '.join(allowed)}"
    if "unknown field" not in message:
        return None
    return nearest(message.split("`")[1], (*Resources.__struct_fields__, *JobSpec.__struct_fields__[2:]))


_SUBJECTS = dict.fromkeys(names_by_field("alternative").values())
ALTERNATIVES = tuple(fields_where("alternative", subject) for subject in _SUBJECTS)
"""Several ways to request one thing: a layer that uses one of them replaces the values of lower layers."""
_PER_GPU = ("cpus_per_gpu", "mem_per_gpu", "ntasks_per_gpu")
_TOTALS = ("ntasks", "gpus")
_PER_NODE = ("nodes", "ntasks_per_node")


class Values:
    """Values under construction, each with its source; a later layer wins."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = dict.fromkeys(FIELDS)
        self.sources: dict[str, str] = {}

    def add(self, resources: Resources, source: str, sources: Mapping[str, str] | None = None) -> None:
        """Apply ``resources``; an explicit null clears. ``sources`` belong to single fields."""
        stated = {f: v for f in resources.__struct_fields__ if (v := getattr(resources, f)) is not UNSET}
        for group in ALTERNATIVES:
            if any(stated.get(field) is not None for field in group):
                self.clear(*group)
        for field, value in stated.items():
            self.set(field, value, (sources or {}).get(field, source))

    def __getitem__(self, field: str) -> Any:
        return self.values.get(field)

    def __setitem__(self, field: str, value: object) -> None:
        self.values[field] = value

    def set(self, field: str, value: object, source: str) -> None:
        self.values[field] = value
        self.sources[field] = source

    def default(self, field: str, value: object, source: str) -> None:
        """Set a field that has no value yet."""
        if self[field] is None:
            self.set(field, value, source)

    def clear(self, *fields: str) -> None:
        """Forget these fields, as if no layer had named them."""
        for field in fields:
            self.values[field] = None
            self.sources.pop(field, None)

    def text(self, field: str) -> str:
        """A value for messages, and where it was read."""
        return f"{field}={self[field]} ({self.sources.get(field, 'default')})"


def merge_resources(layers: Sequence[Layer], site: Site, *, batch: bool = False) -> Values:
    """Merge resources: site defaults < partition defaults < ``layers``; later layers win.

    A batch script gets no defaults of the site. For other programs a total of tasks or GPUs
    that a layer names replaces nodes and tasks per node of the site's defaults, and a list of nodes their number.

    Raises RequestError: a partition that the site does not have.
    """
    values = Values()
    if batch:
        for layer in layers:
            values.add(layer.spec.resources, layer.source, layer.sources)
        return values
    where = f"site {site.name}"
    stated = [(where, site.defaults), *((layer.source, layer.spec.resources) for layer in layers)]
    if site.kind.has_partitions and not site.chooses_partition:
        values.set("partition", site.default_partition, where)
    for source, resources in stated:
        if resources.partition is not UNSET:
            values.set("partition", resources.partition, source)
    of_site = [stated[0]]
    for name, partition in list(named_partitions(values, site).items())[:1]:
        of_site.append((f"partition {name} of {where}", partition.defaults))
    for source, resources in of_site:
        values.add(resources, source)
    requests = [layer.spec.resources for layer in layers]
    named = {field for request in requests for field in _TOTALS if isinstance(getattr(request, field), int | str)}
    if named:
        values.clear(*(field for field in _PER_NODE if field == "nodes" or "ntasks" in named))
    names_nodes = any(isinstance(value, str) for request in requests for value in (request.nodelist, request.nodefile))
    if site.kind.has_nodes and names_nodes:
        values.clear("nodes")
    for source, resources in stated[1:]:
        values.add(resources, source)
    _drop_shares_of_gpus(values, {source for source, _ in of_site})
    return values


def _drop_shares_of_gpus(values: Values, of_site: Collection[str]) -> None:
    """Drop per-GPU defaults of the site for a job without GPUs."""
    if any(values[field] not in (None, 0, "0") for field in GPU_FIELDS):
        return
    values.clear(*(field for field in _PER_GPU if values.sources.get(field) in of_site))


def named_partitions(values: Values, site: Site) -> dict[str, Partition]:
    """Return the named partitions; the first brings its defaults. A local site's only one describes its machine.

    Raises RequestError: the site has no partition of that name.
    """
    text = values["partition"] or (None if site.kind.has_partitions else site.default_partition)
    if text is None or not site.partitions:
        return {}
    names = text.split(",")
    for name in names:
        if name not in site.partitions:
            raise RequestError(
                f"partition {name!r} ({values.sources['partition']}) is not one of site {site.name} ({site.path})",
                hint=nearest(name, site.partitions),
            )
    return {name: site.partitions[name] for name in names}


VARIABLES = {variable: field for field, variable in names_by_field("variable").items()}
"""Variables that users set for all their jobs, without ``SBATCH_`` or ``SALLOC_``.

sbatch does not get them: they would override the script.
"""


def user_settings(environ: Mapping[str, str], *, command: str = "sbatch", rehearsal: bool) -> Iterator[Layer]:
    """One layer per variable of ``command`` that is set. Raises RequestError: a value that the option cannot have."""
    for option, field in sorted(VARIABLES.items()):
        variable = f"{command.upper()}_{option}"
        value = environ.get(variable)
        if not value or (rehearsal and FIELDS[field].personal):
            continue
        try:
            resources = msgspec.convert({field: value}, Resources, strict=False)
        except msgspec.ValidationError as error:
            problem = in_plain_words(str(error).partition(" - at `$.")[0])
            raise RequestError(f"{variable}={value!r} (environment): {problem}", hint=f"unset {variable}") from error
        yield Layer(variable, JobSpec(resources=resources))
