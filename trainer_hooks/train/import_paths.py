"""Objects that a config names by "package.module:name"."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from typing import Any

from rollout.errors import ConfigError


def import_object(path: str, setting: str) -> Any:
    """The object of a module at `path`, "package.module:name"; `setting` is where it was given.

    The working directory is searched too, after all others, as `python -m` would.
    Raises ConfigError for a path without a colon, and for a module or a name that is not there. An
    error inside the module passes through.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"{setting}={path} is no import path; package.module:name is wanted")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Of a module that it imports itself, the traceback says more.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"{setting}={path}: there is no module {error.name}; it is looked for in the working "
            f"directory {os.getcwd()} and on PYTHONPATH"
        ) from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{setting}={path}: {module.__name__} has no {name}")
        found = getattr(found, part)
    return found


def import_function(path: str, options: Mapping[str, Any], setting: str) -> Any:
    """The function at `path` with the arguments `options`, or what a class makes of them.

    `setting`: where both were given, as <setting>.path and <setting>.options. Raises ConfigError
    for a path that names no function, and for options that it does not take.
    """
    function = import_object(path, f"{setting}.path")
    try:
        inspect.signature(function).bind_partial(**options)
        if inspect.isclass(function):
            function = function(**options)
        elif options:
            function = functools.partial(function, **options)
    except TypeError as error:
        raise ConfigError(f"{setting}.options={dict(options)}: {path}: {error}") from error
    if not callable(function):
        raise ConfigError(f"{setting}.path={path} is no function")
    return function
