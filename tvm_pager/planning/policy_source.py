"""Policies that nobody has registered: a class of a module, or of a file.

[Note: One file, one module]
    A file is run once in a process, under a module name of its own that depends on its path; so one
    class is not two, and files of one name in two folders do not meet. Nothing is added to
    `sys.path`: what a file imports must be importable without it.
"""

from __future__ import annotations

import sys
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

from tvm_pager.errors import PolicyError
from tvm_pager.planning.policy import Policy

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["load_from_source"]

_SUFFIX = ".py"


def load_from_source(name: str) -> object:
    """What "module:Class" or "path/to/file.py:Class" names.

    Raises:
        PolicyError: there is no such module, file or class, or it cannot be imported.
    """
    source, _, attribute = name.rpartition(":")
    if name.endswith(_SUFFIX):
        source, attribute = name, ""
    if not source:
        raise PolicyError(f"policy {name!r}: name a module or a file before the colon")
    module = _file(name, source) if source.endswith(_SUFFIX) else _module(name, source, attribute)
    if not attribute:
        classes = _policies_of(module) or ["Mine"]
        raise PolicyError(
            f"policy {name!r}: name a class of the file, such as '{source}:{classes[0]}'"
        )
    try:
        return getattr(module, attribute)
    except AttributeError:
        classes = _policies_of(module)
        raise PolicyError(
            f"policy {name!r}: {source} has no {attribute!r}; its policies: "
            f"{', '.join(classes) or 'none'}"
        ) from None


def _module(name: str, source: str, attribute: str) -> ModuleType:
    if source in sys.modules:
        return sys.modules[source]
    try:
        is_there = find_spec(source) is not None
    except (ImportError, ValueError):  # of a parent package
        is_there = False
    if not is_there:
        raise PolicyError(
            f"policy {name!r}: there is no module {source!r} on Python's path; a file is named by "
            f"its path, such as './{source}.py:{attribute}'"
        )
    try:
        return import_module(source)
    except (Exception, SystemExit) as error:
        raise PolicyError(f"policy {name!r} cannot be imported: {error!r}") from error


def _file(name: str, source: str) -> ModuleType:
    path = Path(source).expanduser().resolve()
    key = f"_tvm_pager_policy_{sha256(str(path).encode()).hexdigest()[:16]}"
    if key in sys.modules:
        return sys.modules[key]
    if not path.is_file():
        raise PolicyError(f"policy {name!r}: there is no file {path}")
    spec = spec_from_file_location(key, path)
    if spec is None or spec.loader is None:
        raise AssertionError(f"{path} has no loader")
    module = module_from_spec(spec)
    sys.modules[key] = module  # dataclasses look their module up while it runs
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[key]
        raise PolicyError(f"policy {name!r} cannot be imported: {error!r}") from error
    return module


def _policies_of(module: ModuleType) -> list[str]:
    """Names of the policies that are defined there."""
    return sorted(
        name
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, Policy)
        and value.__module__ == module.__name__
    )
