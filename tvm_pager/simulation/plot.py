"""Outcomes of a sweep as a picture: step time and traffic by device budget."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from tvm_pager.errors import ConfigError

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from tvm_pager.simulation.sweep import Outcome

__all__ = ["check_plotting", "save_plot"]

_GB = 1e9


def check_plotting() -> None:
    """To be called before hours of simulations.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--plot needs matplotlib ({error}); pip install 'tvm_pager[plot]', or use --csv"
        ) from None


def save_plot(outcomes: Sequence[Outcome], path: str | os.PathLike[str], title: str) -> None:
    """Draws a picture into a file whose ending says its kind (.png, .svg, .pdf).

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    check_plotting()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    times, traffic = figure.subplots(1, 2)
    _draw(times, outcomes, lambda o: o.result.step_ns / 1e9, lambda o: o.bounds.step_ns / 1e9)
    _draw(traffic, outcomes, _moved_gb, lambda o: o.bounds.both_bytes / _GB)
    times.set_ylabel("step (s)")
    traffic.set_ylabel("moved per step (GB)")
    traffic.legend()
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"plot {path}: {error.strerror or error}; name another file") from error
    except ValueError as error:  # a kind of file that it does not know
        raise ConfigError(f"plot {path}: {error}; name a .png") from error


def _draw(axes: Any, outcomes: Sequence[Outcome], value: Any, bound: Any) -> None:
    lines: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    bounds = {}
    for outcome in outcomes:
        device_gb = outcome.cell.limits.device_bytes / _GB
        bounds[device_gb] = bound(outcome)
        if outcome.result is not None:
            lines[outcome.cell.policy].append((device_gb, value(outcome)))
    for policy, points in sorted(lines.items()):
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=policy)
    axes.plot(*zip(*sorted(bounds.items()), strict=True), "k--", label="bound")
    axes.set_xlabel("device budget (GB)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _moved_gb(outcome: Outcome) -> float:
    if outcome.result is None:
        raise AssertionError("no result")
    moved = outcome.result.lane_bytes
    return (moved["d2h"] + moved["h2d"] + moved["d2n"] + moved["n2d"]) / _GB
