"""Who is told of each operation before anything is done for it. The pager's lock is held."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tvm_pager.memory import Page
    from tvm_pager.paging.pager import DemandPager

    Listener = Callable[[str, Sequence[Page]], bool]

__all__ = ["Watch"]


class Watch:
    """Keeps `DemandPager.watch`: one listener, and before it who looks for the iteration's end.

    Args:
        pager: whose.
        pass_boundary: called right before the operation that begins the next iteration.
    """

    def __init__(self, pager: DemandPager, pass_boundary: Callable[[], None]) -> None:
        self._pager = pager
        self._pass_boundary = pass_boundary
        self._listener: Listener | None = None
        self._is_over: Callable[[], bool] | None = None  # else the iteration goes on

    @property
    def is_over(self) -> bool:
        """Whether the next operation begins another iteration."""
        return self._is_over is not None and self._is_over()

    def listen(self, listener: Listener | None) -> None:
        """Replaces the listener; None: nobody listens."""
        self._listener = listener
        self._pager.watch = listener if self._is_over is None else self._wait

    def end_when(self, is_over: Callable[[], bool] | None) -> None:
        """The iteration is over when an operation comes for which `is_over()`; None: it goes on."""
        self._is_over = is_over
        self.listen(self._listener)

    def end(self) -> None:
        """Nobody listens any more, and the iteration goes on."""
        self._is_over = None
        self.listen(None)

    def _wait(self, name: str, pages: Sequence[Page]) -> bool:
        # Profilers mark what they see by operations of their own.
        if (pages or name.startswith("aten::")) and self.is_over:
            self._pass_boundary()
        listener = self._listener
        return listener is None or listener(name, pages)
