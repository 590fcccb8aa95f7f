"""Where policies come from: built-ins by dotted path, third parties by entry point.

Built-ins are a table, not entry points, so that they work uninstalled and can never be replaced
from outside.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from tvm_pager.errors import PolicyError
from tvm_pager.planning.policy import Policy

__all__ = ["ENTRY_POINT_GROUP", "available_policies", "load_policy"]

ENTRY_POINT_GROUP = "tvm_pager.policies"

_BUILT_IN = {
    "clock": "tvm_pager.policies.clock:Clock",
    "lru": "tvm_pager.policies.lru:LRU",
}


def available_policies() -> list[str]:
    """Names that `load_policy` accepts: built-ins and installed entry points (not imported)."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def load_policy(name: str) -> type[Policy]:
    """Imports the policy of this name, and nothing else.

    Raises:
        PolicyError: the name is unknown, registered twice, shadows a built-in, cannot be imported,
            or is no `Policy`.
    """
    points = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if name in _BUILT_IN:
        if points:
            raise PolicyError(
                f"policy {name!r} is built in, but {_origin(points)} registers the same name; "
                "rename theirs"
            )
        module, _, attribute = _BUILT_IN[name].partition(":")
        return _checked(name, getattr(import_module(module), attribute), _BUILT_IN[name])
    if not points:
        raise PolicyError(
            f"no policy is called {name!r}; there are: {', '.join(available_policies())}"
        )
    if len(points) > 1:
        raise PolicyError(
            f"policy {name!r} is registered by {_origin(points)}; uninstall all but one"
        )
    try:
        loaded = points[0].load()
    except Exception as error:
        raise PolicyError(
            f"policy {name!r} ({points[0].value} of {_origin(points)}) cannot be imported: "
            f"{error!r}"
        ) from error
    return _checked(name, loaded, points[0].value)


def _checked(name: str, loaded: object, origin: str) -> type[Policy]:
    if not (isinstance(loaded, type) and issubclass(loaded, Policy)):
        raise PolicyError(
            f"policy {name!r}: {origin} is {loaded!r}, not a subclass of tvm_pager.planning.Policy"
        )
    return loaded


def _origin(points: list[EntryPoint]) -> str:
    return " and ".join(
        sorted(point.dist.name if point.dist else "an unknown distribution" for point in points)
    )
