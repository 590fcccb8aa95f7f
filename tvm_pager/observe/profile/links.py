"""Host <-> device: rates by chunk size, alone and duplex, and what an empty copy costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm_pager.observe.profile.copies import D2H, H2D
from tvm_pager.observe.profile.rounds import cost_ns, overlap_rates, repeat
from tvm_pager.planning.hardware.rates import Curve, Figure, LinkRate, Point

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tvm_pager.observe.profile.copies import Copies
    from tvm_pager.observe.profile.effort import Effort

__all__ = ["LinkFigures", "measure_links"]

_FIRST_CHUNKS = 8


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """What `measure_links` found; the fields are those of `HardwareProfile` and `Overheads`."""

    h2d: LinkRate
    d2h: LinkRate
    duplex_total_bytes_per_s: Curve
    empty_h2d_ns: Figure
    empty_d2h_ns: Figure


def measure_links(copies: Copies, effort: Effort) -> LinkFigures:
    """Measures both directions, alone and together, for each chunk size that fits. Blocks."""
    h2d, d2h, h2d_duplex, d2h_duplex, total = ([] for _ in range(5))
    for chunk_bytes in chunk_sizes(effort.link_chunks, copies.nbytes):
        (alone,) = _measure(copies, (H2D,), chunk_bytes, effort)
        h2d.append(Point(chunk_bytes, alone))
        (alone,) = _measure(copies, (D2H,), chunk_bytes, effort)
        d2h.append(Point(chunk_bytes, alone))
        down, up, both = _measure(copies, (H2D, D2H), chunk_bytes, effort)
        h2d_duplex.append(Point(chunk_bytes, down))
        d2h_duplex.append(Point(chunk_bytes, up))
        total.append(Point(chunk_bytes, both))
    return LinkFigures(
        LinkRate.fitted(Curve(tuple(h2d)), Curve(tuple(h2d_duplex))),
        LinkRate.fitted(Curve(tuple(d2h)), Curve(tuple(d2h_duplex))),
        Curve(tuple(total)),
        cost_ns(lambda num_calls: copies.time_empty(H2D, num_calls), effort),
        cost_ns(lambda num_calls: copies.time_empty(D2H, num_calls), effort),
    )


def chunk_sizes(wanted: Sequence[int], nbytes: int) -> list[int]:
    """The sizes (rising) that `nbytes` has room for; all of `nbytes` if it has for none."""
    return [size for size in wanted if size <= nbytes] or [nbytes]


def _measure(
    copies: Copies, sides: Sequence[int], chunk_bytes: int, effort: Effort
) -> list[Figure]:
    """Bytes/s of each side, and of both together if there are two."""
    most = max(1, effort.link_round_bytes // (chunk_bytes * len(sides)))
    num_chunks = min(_FIRST_CHUNKS, most)
    # The second try is the warm-up too: the first one knows neither the rate nor warm clocks.
    for _ in range(2):
        spans = copies.run(sides, chunk_bytes, num_chunks)
        seconds = max(max(span.end_s for span in side) for side in spans) - min(
            min(span.start_s for span in side) for side in spans
        )
        fitting = int(num_chunks * effort.round_s / max(seconds, 1e-9))
        num_chunks = max(1, min(most, fitting))

    def run_round() -> list[float]:
        rates = overlap_rates(copies.run(sides, chunk_bytes, num_chunks))
        return rates if len(rates) == 1 else [*rates, sum(rates)]

    return repeat(run_round, effort.num_rounds, effort.round_s)
