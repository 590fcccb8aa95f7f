"""Where policies come from: built-ins, installed packages, modules and files.

[Note: Names of policies]
    "lru": built in, or registered by an installed package under the entry point group
    `tvm_pager.policies`. "package.module:Class" and "path/to/mine.py:Class" need no registration; a
    path is taken from the working directory. Built-ins are a table, not entry points, so that they
    work uninstalled and can never be replaced from outside.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from tvm_pager.errors import PolicyError
from tvm_pager.planning.policy import Policy
from tvm_pager.planning.policy_source import load_from_source

__all__ = ["ENTRY_POINT_GROUP", "available_policies", "load_policy"]

ENTRY_POINT_GROUP = "tvm_pager.policies"

_BUILT_IN = {
    "belady": "tvm_pager.policies.belady:Belady",
    "capuchin": "tvm_pager.policies.capuchin:Capuchin",
    "clock": "tvm_pager.policies.clock:Clock",
    "dtr": "tvm_pager.policies.dtr:DTR",
    "flashneuron": "tvm_pager.policies.flashneuron:FlashNeuron",
    "lookahead": "tvm_pager.policies.lookahead:Lookahead",
    "lru": "tvm_pager.policies.lru:LRU",
    "slideformer": "tvm_pager.policies.slideformer:SlideFormer",
    "teraio": "tvm_pager.policies.teraio:TeraIO",
    "traffic_aware": "tvm_pager.policies.traffic_aware:TrafficAware",
    "zero_infinity": "tvm_pager.policies.zero_infinity:ZeroInfinity",
}


def available_policies() -> list[str]:
    """Names of the built-in and the installed policies, which are not imported for that."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def load_policy(name: str) -> type[Policy]:
    """Imports the policy of this name, and no other; see [Note: Names of policies].

    Raises:
        PolicyError: the name is unknown, registered twice, shadows a built-in, cannot be imported,
            is no `Policy`, or cannot be made without arguments.
    """
    if ":" in name or name.endswith(".py"):
        return _checked(f"policy {name!r}", load_from_source(name))
    points = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if name in _BUILT_IN:
        if points:
            raise PolicyError(
                f"policy {name!r} is built in, but {_origin(points)} registers the same name; "
                "rename theirs"
            )
        module, _, attribute = _BUILT_IN[name].partition(":")
        return _checked(f"policy {name!r}", getattr(import_module(module), attribute))
    if not points:
        raise PolicyError(
            f"no policy is called {name!r}; there are: {', '.join(available_policies())}; "
            "a file is named as in 'path/to/mine.py:Mine'"
        )
    if len(points) > 1:
        raise PolicyError(
            f"policy {name!r} is registered by {_origin(points)}; uninstall all but one"
        )
    source = f"policy {name!r} ({points[0].value} of {_origin(points)})"
    try:
        loaded = points[0].load()
    except (Exception, SystemExit) as error:
        raise PolicyError(f"{source} cannot be imported: {error!r}") from error
    return _checked(source, loaded)


def _checked(source: str, loaded: object) -> type[Policy]:
    if not (isinstance(loaded, type) and issubclass(loaded, Policy)):
        raise PolicyError(f"{source} is {loaded!r}, not a subclass of tvm_pager.planning.Policy")
    try:
        inspect.signature(loaded).bind()
    except TypeError as error:
        raise PolicyError(
            f"{source}: one is made for each tier, without arguments, and {loaded.__name__} has a "
            f"{error}; give it a default"
        ) from None
    return loaded


def _origin(points: list[EntryPoint]) -> str:
    return " and ".join(
        sorted(point.dist.name if point.dist else "an unknown distribution" for point in points)
    )
