"""Two results side by side, and the verdict. Pure: numbers in, text out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm_pager.demo.digest import combine
from tvm_pager.demo.text import PROMPT
from tvm_pager.observe.table import format_rows
from tvm_pager.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Comparison", "format_report"]

_KINDS = ("gradients", "weights", "optimizer states")
_TIERS = ("device", "host", "nvme")
_MAX_NAMES = 3  # of differing tensors


@dataclass(frozen=True, slots=True)
class Comparison:
    """The results of both workers.

    Attributes:
        name: the model, for people.
        options: what was asked for.
        plain: result of the plain worker.
        paged: result of the paged worker.
        device_budget_bytes: what the paged run was allowed.
        seconds: of the whole demonstration.
    """

    name: str
    options: dict[str, Any]
    plain: dict[str, Any]
    paged: dict[str, Any]
    device_budget_bytes: int
    seconds: float

    def equal(self) -> dict[str, bool]:
        """Says per kind of result whether the two runs agree in every bit."""
        digests = {
            kind: self.plain["digests"][kind] == self.paged["digests"][kind] for kind in _KINDS
        }
        return {
            # As text, because NaN differs from itself; a float's text gives it back exactly.
            "losses": [*map(repr, self.plain["losses"])] == [*map(repr, self.paged["losses"])],
            **digests,
            "tokens": self.plain["tokens"] == self.paged["tokens"],
        }

    def differing(self, kind: str) -> list[str]:
        """Names the tensors of one kind that differ or that only one run has."""
        plain, paged = self.plain["digests"][kind], self.paged["digests"][kind]
        return sorted(name for name in plain | paged if plain.get(name) != paged.get(name))

    def over_budget(self) -> list[str]:
        """Names the tiers whose peak is above their budget."""
        stats = self.paged["stats"]
        return [
            tier
            for tier in _TIERS
            if stats[f"{tier}_budget_bytes"] is not None
            and stats[f"{tier}_peak_bytes"] > stats[f"{tier}_budget_bytes"]
        ]

    def is_good(self) -> bool:
        """Says whether everything is equal and every tier kept its budget."""
        return all(self.equal().values()) and not self.over_budget()

    def to_dict(self) -> dict[str, Any]:
        """Gives everything for JSON, checksums combined by kind."""
        sides = {
            side: {**result, "digests": {k: combine(v) for k, v in result["digests"].items()}}
            for side, result in (("plain", self.plain), ("paged", self.paged))
        }
        return {
            "model": self.name,
            "options": self.options,
            **sides,
            "device_budget_bytes": self.device_budget_bytes,
            "seconds": self.seconds,
            "equal": self.equal(),
            "differing": {kind: self.differing(kind) for kind in _KINDS},
            "over_budget": self.over_budget(),
            "is_good": self.is_good(),
        }


def format_report(comparison: Comparison, decode: Callable[[list[int]], str] | None) -> str:
    """Writes the report. `decode` turns token ids into text; None: they are shown as numbers."""
    options = comparison.options
    lines = [
        f"{comparison.name} on {comparison.plain['torch_device']}: {options['steps']} steps of "
        f"AdamW on {options['batch']} x {options['seq']} tokens of Python's standard library, "
        f"fp32, then up to {options['tokens']} tokens after {PROMPT!r}",
        "",
        *format_rows([["", "plain", "paged"], *_result_rows(comparison, decode)]),
        "",
        *format_rows(_tier_rows(comparison)),
        "",
        *format_rows(_residency_rows(comparison.paged["residency"])),
        "",
        *_traffic(comparison),
    ]
    for kind in _KINDS:
        if names := comparison.differing(kind):
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            lines.append(f"{kind} differ in {', '.join(names[:_MAX_NAMES])}{more}")
    lines += [f"the {tier} tier went over its budget" for tier in comparison.over_budget()]
    verdict = ", ".join(
        f"{kind} {'yes' if equal else 'NO'}" for kind, equal in comparison.equal().items()
    )
    return "\n".join([*lines, f"bitwise equal: {verdict}"])


def _result_rows(
    comparison: Comparison, decode: Callable[[list[int]], str] | None
) -> list[list[str]]:
    sides = (comparison.plain, comparison.paged)
    rows = [
        [f"loss, step {step + 1}", *(f"{side['losses'][step]:.9f}" for side in sides)]
        for step in range(comparison.options["steps"])
    ]
    if decode is not None:
        # Both columns carry text, so it is kept to the first line.
        rows.append(["generated text", *(repr(_first_line(decode(s["tokens"]))) for s in sides)])
    rows.append(["first tokens", *(" ".join(map(str, side["tokens"][:8])) for side in sides)])
    rows += [
        [f"{kind}, sha256", *(combine(side["digests"][kind])[:16] for side in sides)]
        for kind in _KINDS
    ]
    rows.append(["seconds a step", *(_each(side["seconds"]["steps"]) for side in sides)])
    for phase in ("generate", "build", "checksums"):
        rows.append([f"seconds, {phase}", *(f"{side['seconds'][phase]:.1f}" for side in sides)])
    if all(side["rss_peak_bytes"] for side in sides):
        peaks = (format_bytes(side["rss_peak_bytes"]) for side in sides)
        rows.append(["process memory, peak", *peaks])
    return rows


def _first_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 40 else text[:40] + "..."


def _each(seconds: list[float]) -> str:
    shown = [f"{value:.2f}" for value in seconds[:4]]
    return " ".join(shown) + (" ..." if len(seconds) > 4 else "")


def _tier_rows(comparison: Comparison) -> list[list[str]]:
    stats, need_bytes = comparison.paged["stats"], comparison.plain["need_bytes"]
    rows = [["tier", "plain needs", "budget", "paged peak"]]
    for tier in _TIERS:
        budget_bytes, peak_bytes = stats[f"{tier}_budget_bytes"], stats[f"{tier}_peak_bytes"]
        share = f" ({peak_bytes / need_bytes:.0%} of plain)" if tier == "device" else ""
        rows.append(
            [
                tier,
                format_bytes(need_bytes) if tier == "device" else "-",
                "no limit" if budget_bytes is None else format_bytes(budget_bytes),
                format_bytes(peak_bytes) + share,
            ]
        )
    if "max_memory_reserved" in comparison.paged:
        rows.append(["allocator", "", "", format_bytes(comparison.paged["max_memory_reserved"])])
    return rows


def _residency_rows(residency: dict[str, dict[str, int]]) -> list[list[str]]:
    """The most bytes of each kind that were seen in each tier between operations."""
    return [
        ["seen at most in", *_TIERS],
        *(
            [kind, *(format_bytes(by_tier.get(tier, 0)) for tier in _TIERS)]
            for kind, by_tier in residency.items()
        ),
    ]


def _traffic(comparison: Comparison) -> list[str]:
    stats = comparison.paged["stats"]
    moved = ", ".join(
        f"{lane} {format_bytes(nbytes)}"
        for lane, nbytes in stats["bytes_by_lane"].items()
        if nbytes
    )
    return [
        f"moved: {moved or 'nothing'}",
        f"faults {stats['num_faults']:,}, evictions {stats['num_evictions']:,} "
        f"({stats['num_clean_evictions']:,} clean), stalled for "
        f"{format_seconds(stats['stall_s'])}, engine {stats['engine']}, policy "
        f"{comparison.options['policy']}",
        *(f"notice: {notice}" for notice in stats["notices"]),
        f"all in {format_seconds(comparison.seconds)}",
    ]
