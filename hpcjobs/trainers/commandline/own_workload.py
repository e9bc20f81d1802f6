"""A workload of the user's own, found by the name `package.module:function`."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from inspect import Parameter, signature
from types import ModuleType
from typing import Any

from hpcjobs.runtime.exits import UsageError

POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.VAR_POSITIONAL)


def find_function(name: str) -> Callable[..., Any]:
    """Return the function that `--workload` names. Its module may be in the current folder, behind all others.

    Raises:
        UsageError: a part of the name does not exist; the message names it.
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
