"""The flags of every trainer, and the check of a command line where the job is submitted, without torch.

Flags are made from frozen dataclasses: each field is a flag, declared in the module that uses it. None means "not
given": the workload's own default is used. A workload of the user's own is found by the name `package.module:function`,
and the keyword-only parameters of its function are flags too.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, make_dataclass
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from inspect import Parameter, signature
from types import ModuleType, NoneType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from hpcjobs.runtime.exits import UsageError
from hpcjobs.trackers import TRACKERS

T = TypeVar("T")
Number = TypeVar("Number", int, float)


def flag(
    default: Any,
    help: str,
    *,
    parse: Callable[[str], Any] = str,
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
) -> Any:
    """A dataclass field that is also `--its-name`. A tuple as default takes one or more values."""
    settings = {"help": help, "parse": parse, "choices": choices, "metavar": metavar}
    return field(default=default, metadata=settings)


def positive(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    return functools.partial(_parse_number, kind, "more than 0", lambda value: value > 0)


def not_negative(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    return functools.partial(_parse_number, kind, "0 or more", lambda value: value >= 0)


def _parse_number(
    kind: Callable[[str], Number], requirement: str, holds: Callable[[Number], bool], text: str
) -> Number:
    try:
        value = kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not holds(value):
        raise argparse.ArgumentTypeError(f"{text} is not {requirement}")
    return value


class StepRange(NamedTuple):
    """The steps after step `start`, up to step `stop`."""

    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


def parse_step_range(text: str) -> StepRange:
    start, colon, stop = text.partition(":")
    if not (colon and start.isascii() and start.isdigit() and stop.isascii() and stop.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not START:STOP, such as 10:13")
    steps = StepRange(int(start), int(stop))
    if steps.start >= steps.stop:
        raise argparse.ArgumentTypeError(f"{text}: STOP is not after START")
    return steps


class Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that one rank alone prints the error."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}", hint=f"{self.prog} --help")


def list_options(item: Field[Any]) -> list[str]:
    """List the flags of a field with their dashes."""
    name = item.name.replace("_", "-")
    return [f"--{name}", f"--no-{name}"] if isinstance(item.default, bool) else [f"--{name}"]


def add_flags(parser: argparse.ArgumentParser, owner: type[Any], *, title: str) -> None:
    """Add one flag per field of `owner`."""
    group = parser.add_argument_group(title)
    for item in fields(owner):
        name, meta = "--" + item.name.replace("_", "-"), item.metadata
        shown = "" if item.default in (None, (), "", MISSING) else f" [{item.default}]"
        help_text = (meta["help"] + shown).replace("%", "%%")  # argparse reads a single one as the start of a format
        common: dict[str, Any] = {"dest": item.name, "help": help_text}
        common |= {"required": True} if item.default is MISSING else {"default": item.default}
        if isinstance(item.default, bool):
            group.add_argument(name, action=argparse.BooleanOptionalAction, **common)
            continue
        many: dict[str, Any] = {"nargs": "+"} if isinstance(item.default, tuple) else {}
        group.add_argument(name, type=meta["parse"], choices=meta["choices"], metavar=meta["metavar"], **common, **many)


def flags_of(function: Callable[..., object]) -> type[Any]:
    """A dataclass of flags from the keyword-only parameters of a function: their names, types, defaults and help.

    `width: int = 32` is `--width`; `width: Annotated[int, "hidden units"] = 32` has a help text too. Types are str,
    int, float, bool, Literal of strings, and each of these `| None`.

    Raises UsageError: a parameter has no type, or one that no flag can have.
    """
    own = [one for one in inspect.signature(function).parameters.values() if one.kind is one.KEYWORD_ONLY]
    hints = get_type_hints(function, include_extras=True) if own else {}
    items: list[tuple[str, Any, Any]] = []
    for parameter in own:
        hint, help_text = hints.get(parameter.name), ""
        if get_origin(hint) is Annotated:
            hint, *notes = get_args(hint)
            help_text = " ".join(note for note in notes if isinstance(note, str))
        alternatives = [one for one in get_args(hint) if one is not NoneType] if NoneType in get_args(hint) else [hint]
        kind = alternatives[0] if len(alternatives) == 1 else None
        choices = get_args(kind) if get_origin(kind) is Literal else None
        if choices is None and (kind is None or kind not in (str, int, float, bool)):
            raise UsageError(
                f"the parameter {parameter.name} of {function.__name__} has the type {hint}, which no flag can have",
                hint="str, int, float, bool, Literal of strings, or one of these | None",
            )
        default = MISSING if parameter.default is parameter.empty else parameter.default
        parse = str if kind is None or choices is not None else kind
        settings = {"help": help_text, "parse": parse, "choices": choices, "metavar": None}
        items.append((parameter.name, Any, field(default=default, metadata=settings)))
    return make_dataclass("WorkloadFlags", items, frozen=True, kw_only=True)


def read_flags(owner: type[T], parsed: argparse.Namespace) -> T:
    """Return `owner` with the values of a parsed command line."""
    values = {item.name: getattr(parsed, item.name) for item in fields(owner)}  # type: ignore[arg-type]
    return owner(**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})


class UnknownFlagError(UsageError):
    """An argument that is not a known flag."""

    def __init__(self, trainer: str, argument: str, *, hint: str) -> None:
        super().__init__(f"{trainer}: unknown argument {argument!r}", hint=hint)
        self.argument = argument


def parse_all(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments; the error for an unknown flag names the nearest known one.

    Raises UnknownFlagError: a flag is unknown. UsageError: a flag has an invalid value.
    """
    parsed, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [name for action in parser._actions for name in action.option_strings]
        near = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"{parser.prog} --help lists the flags"
        raise UnknownFlagError(parser.prog, unknown[0], hint=hint)
    return parsed


@dataclass(frozen=True)
class Config:
    """The flags of every trainer; None is the default of the workload."""

    workload: str = flag("mnist", "lm, matmul, mnist, resnet50, or a function of your own as `package.module:function`")
    epochs: int | None = flag(None, "passes over the training data", parse=positive(int), metavar="N")
    steps: int | None = flag(None, "stop after so many optimizer steps", parse=positive(int), metavar="N")
    batch_size: int | None = flag(None, "samples per rank and forward pass", parse=positive(int), metavar="N")
    accumulate: int = flag(1, "forward passes per optimizer step", parse=positive(int), metavar="N")
    lr: float | None = flag(None, "learning rate before scaling", parse=positive(float))
    lr_scaling: str = flag(
        "none", "multiply the rate by the world size, its root, or 1", choices=("none", "sqrt", "linear")
    )
    lr_schedule: str | None = flag(
        None,
        "of the rate after the warm-up; wsd is constant, and linear over the last fifth [the workload's own, constant]",
        choices=("constant", "cosine", "linear", "wsd"),
    )
    lr_final: float = flag(0.1, "share of the rate at the last step of a schedule", parse=not_negative(float))
    warmup_steps: int | None = flag(
        None,
        "steps over which the rate rises from near 0 [a tenth of the run where the rate is above the workload's own]",
        parse=not_negative(int),
        metavar="N",
    )
    optimizer: str | None = flag(None, "[the workload's own, adamw]", choices=("adafactor", "adamw", "sgd"))
    betas: tuple[float, ...] = flag((), "two, of adamw [0.9 0.999]", parse=not_negative(float), metavar="BETA")
    eps: float | None = flag(None, "of adamw [1e-08]", parse=positive(float))
    momentum: float | None = flag(None, "of sgd [0.9]", parse=not_negative(float))
    weight_decay: float | None = flag(None, "decoupled in adamw [the workload's own]", parse=not_negative(float))
    decay_norms: bool = flag(True, "weight decay also of norms and biases: of parameters of one dimension")
    ema: float | None = flag(
        None, "evaluate an exponential moving average of the weights, with this decay per step", parse=positive(float)
    )
    gradient_norm: bool = flag(False, "record the norm of the gradient, as --clip-norm does")
    clip_norm: float | None = flag(None, "largest norm of the gradient", parse=positive(float))
    seed: int = flag(0, "of the weights and of the order of samples", parse=int)
    precision: str = flag("fp32", "bf16 and fp16 are mixed precision", choices=("fp32", "bf16", "fp16"))
    tf32: bool = flag(False, "TF32 matrix products and convolutions on GPUs that have them, with --precision fp32")
    deterministic: bool = flag(False, "refuse operations whose result may differ from run to run")
    device: str = flag("auto", "auto takes a GPU where torch sees one", choices=("auto", "cpu", "cuda"))
    compile: bool = flag(False, "torch.compile the model")
    compile_blocks: bool = flag(False, "torch.compile each block by itself: once for all that are alike")
    activation_checkpointing: bool = flag(False, "compute each block's forward pass again in the backward: less memory")
    sync_batchnorm: bool = flag(False, "BatchNorm's statistics are of the batches of all ranks")
    workers: int | None = flag(
        None,
        "loader processes per rank, for the whole run; as many again for evaluation "
        "[with a GPU the rank's cores less one, at most 8; else 0]",
        parse=not_negative(int),
        metavar="N",
    )
    log_every: int = flag(10, "steps between two lines of metrics", parse=positive(int), metavar="N")
    eval_every: int | None = flag(
        None,
        "steps between evaluations of the held-out part; 0: none [after each epoch]",
        parse=not_negative(int),
        metavar="N",
    )
    eval_batches: int | None = flag(None, "batches per rank and evaluation [all]", parse=positive(int), metavar="N")
    checkpoint_every: int | None = flag(None, "steps between checkpoints", parse=positive(int), metavar="N")
    save_every_epochs: int | None = flag(None, "epochs between checkpoints", parse=positive(int), metavar="N")
    checkpoint_keep: int = flag(3, "newest checkpoints kept; the best stays too", parse=positive(int), metavar="N")
    checkpoint_async: bool = flag(True, "write checkpoints while training goes on")
    init_from: str | None = flag(
        None, "begin with these weights: a .safetensors file, or a folder of such", metavar="PATH"
    )
    lora: int | None = flag(
        None, "train low-rank adapters of this rank; all other weights are frozen", parse=positive(int), metavar="RANK"
    )
    lora_alpha: float | None = flag(
        None, "scale of adapters, divided by their rank [twice the rank]", parse=positive(float)
    )
    lora_targets: tuple[str, ...] = flag(
        (), "last parts of the names of layers to adapt [all linear ones of the blocks]", metavar="NAME"
    )
    resume: str = flag(
        "auto", "auto: from the run folder's newest sound checkpoint; none, or a folder: where the first attempt begins"
    )
    probe_every: int = flag(
        250, "steps between two measurements of exposed communication", parse=positive(int), metavar="N"
    )
    probe: bool = flag(True, "measure exposed communication, on passes that do not train")
    monitor: bool = flag(False, "each second, what cores, memory, network and GPUs do, into monitor.jsonl")
    profile: StepRange | None = flag(  # noqa: RUF009 (a field, as the others)
        None,
        "profile the steps after START up to STOP: a trace per rank, and the costliest operators in the log",
        parse=parse_step_range,
        metavar="START:STOP",
    )
    memory_snapshot: bool = flag(False, "record the allocations on each GPU, for pytorch.org/memory_viz")
    stall_after: float | None = flag(
        None,
        "end the run after so many seconds without a step [30 times the p95 step, of several ranks or with --retries]",
        parse=positive(float),
        metavar="S",
    )
    log_to: tuple[str, ...] = flag(
        (),
        "copy metrics to these programs, without a network into the run folder",
        choices=tuple(TRACKERS),
        metavar="PROGRAM",
    )
    run_dir: str | None = flag(None, "folder for metrics, summary, checkpoints", metavar="DIR")
    rendezvous_timeout_s: float = flag(60.0, "wait so long for all ranks", parse=positive(float))
    stage_to: str | None = flag(
        None, "copy --data, --text and --tokens once per node to this local folder", metavar="DIR"
    )
    # for workloads
    data: str | None = flag(
        None,
        "mnist: folder with the idx files; resnet50: with train/CLASS/* and val/CLASS/*, with WebDataset's *.tar, "
        "or saved by Hugging Face's datasets",
        metavar="DIR",
    )
    text: tuple[str, ...] = flag((), "lm: train on these files, byte by byte, with 256 tokens", metavar="FILE")
    tokens: tuple[str, ...] = flag(
        (), "lm: train on these folders or .bin files of tokens, of nanoGPT's or Megatron's layout", metavar="PATH"
    )
    vocabulary: int | None = flag(
        None, "lm: tokens that --tokens has [what its tokens.json says]", parse=positive(int), metavar="N"
    )
    model: str | None = flag(
        None, "lm: train this model of Hugging Face's transformers, from a local folder", metavar="DIR"
    )
    preset: str = flag("tiny", "lm: size of the decoder", choices=("tiny", "small", "gpt2"))
    sequence_length: int | None = flag(None, "lm: tokens per sample", parse=positive(int), metavar="N")
    train_samples: int | None = flag(
        None,
        "synthetic data: samples per epoch [enough for 32 steps, and at least the workload's own number]",
        parse=positive(int),
        metavar="N",
    )
    image_size: int = flag(224, "resnet50: side of an image in pixels", parse=positive(int), metavar="N")
    augment: bool = flag(True, "resnet50: train on random parts of the images of --data, mirrored half the time")
    label_smoothing: float = flag(
        0.0, "resnet50: share of each target that is spread over all classes", parse=not_negative(float)
    )
    channels_last: bool = flag(True, "resnet50: the channels of a pixel lie side by side in memory")
    matrix_size: int | None = flag(
        None, "matmul: rows and columns [2048, on a GPU 8192]", parse=positive(int), metavar="N"
    )


def check_arguments(trainer: str, argv: Sequence[str]) -> str:
    """Parse ``argv`` as ``trainer`` will, and return the name of the workload.

    A user's own workload is not imported, so unknown arguments pass: they may be its flags.

    Raises UnknownFlagError: a flag is unknown. UsageError: a flag has an invalid value.
    """
    arguments = [arg for arg in argv if arg not in ("-h", "--help")]
    parser = _parser(trainer)
    parsed, unknown = parser.parse_known_args(arguments)
    workload: str = parsed.workload
    if unknown and ":" not in workload:
        parse_all(parser, arguments)
    return workload


def flag_names(trainer: str) -> list[str]:
    """List the flags of ``trainer`` with their dashes."""
    return [name for action in _parser(trainer)._actions for name in action.option_strings]


def flag_choices(trainer: str, name: str) -> list[str]:
    """The values that the flag ``name`` of ``trainer`` can have; empty: any, or no such flag."""
    actions = (action for action in _parser(trainer)._actions if name in action.option_strings)
    return [str(choice) for action in actions for choice in action.choices or ()]


@functools.cache
def _parser(trainer: str) -> argparse.ArgumentParser:
    parser = Parser(prog=trainer, allow_abbrev=False)
    add_flags(parser, Config, title="every trainer")
    add_flags(parser, own_flags(trainer), title=trainer)
    return parser


def own_flags(trainer: str) -> type[Any]:
    """The flags of ``trainer`` alone: the one dataclass that its module defines."""
    module = import_module(f"hpcjobs.trainers.{trainer}")
    values = vars(module).values()
    (flags,) = (value for value in values if is_dataclass(value) and value.__module__ == module.__name__)
    assert isinstance(flags, type)
    return flags


POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.VAR_POSITIONAL)


def find_function(name: str) -> Callable[..., Any]:
    """Return the function that `--workload` names. Its module may be in the current folder, behind all others.

    Raises UsageError: a part of the name does not exist; the message names it.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise UsageError(f"--workload {name}: a workload of your own is written package.module:function")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        _load_from_folder(module_name.partition(".")[0], os.getcwd())
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            hint = f"{module_name} imports it; pip install it, or name it in `software` of the site"
            raise UsageError(f"--workload {name}: {error}", hint=hint) from error
        hint = f"run where {module_name.replace('.', '/')}.py lies, or export PYTHONPATH=FOLDER"
        raise UsageError(f"--workload {name}: no module is called {error.name!r}", hint=hint) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UsageError(f"--workload {name}: {_describe_missing(module, function_name)}")
    _refuse_other_parameters(name, function)
    return function  # type: ignore[no-any-return]


def _load_from_folder(package: str, folder: str) -> None:
    """Load the user's own package or module from `folder` if it has one, although another of the name is installed."""
    spec = None if package in sys.modules else PathFinder.find_spec(package, [folder])
    if spec is None or spec.loader is None or spec.origin is None:
        return
    sys.modules[package] = module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[package]
        raise


def _refuse_other_parameters(name: str, function: Callable[..., Any]) -> None:
    """Raise UsageError unless the config is the only required positional parameter of the function."""
    own = getattr(function, "__name__", "the function")
    positional = [one for one in signature(function).parameters.values() if one.kind in POSITIONAL]
    if not positional:
        raise UsageError(f"--workload {name}: {own}() takes no config; write def {own}(config, *, ...)")
    for parameter in positional[1:]:
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
            raise UsageError(
                f"--workload {name}: its parameter {parameter.name} has no default and comes before the *",
                hint=f"def {own}(config, *, {parameter.name}: ...), and --{parameter.name.replace('_', '-')} is a flag",
            )


def _describe_missing(module: ModuleType, function_name: str) -> str:
    if hasattr(module, function_name):
        return f"{function_name} in {module.__file__} is a {type(getattr(module, function_name)).__name__}, no function"
    functions = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    near = difflib.get_close_matches(function_name, functions, n=1)
    there = f"did you mean {near[0]}?" if near else f"it defines {', '.join(functions) or 'nothing'}"
    return f"{module.__file__} has no function {function_name}: {there}"
