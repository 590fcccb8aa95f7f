"""Which state may follow which: docs/states.md as a table. Only the page table enters states."""

from __future__ import annotations

from tvm_pager.memory.page import Page, PageState

__all__ = ["enter"]

_ALLOWED: dict[PageState, frozenset[PageState]] = {
    PageState.RESIDENT: frozenset({PageState.WRITING_BACK, PageState.EVICTED, PageState.DEAD}),
    PageState.WRITING_BACK: frozenset({PageState.RESIDENT, PageState.LEAVING, PageState.DEAD}),
    PageState.LEAVING: frozenset(
        {PageState.EVICTED, PageState.FETCHING, PageState.FAILED, PageState.DEAD}
    ),
    PageState.EVICTED: frozenset({PageState.FETCHING, PageState.DEMOTING, PageState.DEAD}),
    PageState.DEMOTING: frozenset({PageState.EVICTED, PageState.DEAD}),
    PageState.FETCHING: frozenset(
        {PageState.RESIDENT, PageState.EVICTED, PageState.FAILED, PageState.DEAD}
    ),
    PageState.FAILED: frozenset({PageState.FETCHING, PageState.DEAD}),
    PageState.DEAD: frozenset(),
}


def enter(page: Page, state: PageState) -> None:
    """Changes a page's state, the last step of a transition.

    Raises:
        AssertionError: it may not follow the present one.
    """
    if state not in _ALLOWED[page.state]:
        raise AssertionError(f"illegal transition {page.state.value} -> {state.value} of {page!r}")
    page.state = state
