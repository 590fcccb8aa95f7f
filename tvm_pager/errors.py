"""The error tree. Every message says what was asked, the numbers, and the remedy."""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "CommitError",
    "ConfigError",
    "PagerClosedError",
    "PagerError",
    "PolicyError",
    "TraceError",
    "TransferError",
    "UnpageableError",
]


class PagerError(RuntimeError):
    """Base of everything that tvm_pager raises about paging."""


class ConfigError(PagerError, ValueError):
    """A budget, directory, policy name or option cannot be used as given."""


class BudgetError(PagerError):
    """One operation needs more device memory than the budget can ever give it."""


class CommitError(PagerError):
    """All tiers together cannot back one more page."""


class PolicyError(PagerError):
    """A policy is unknown, could not be loaded, raised, or decided something illegal."""


class TraceError(PagerError, ValueError):
    """A trace, or a plan for one, contradicts itself or cannot be read."""


class PagerClosedError(PagerError):
    """The pager that holds a page's bytes has been closed."""


class UnpageableError(PagerError, TypeError):
    """A tensor cannot become a page, or a paged tensor cannot be used in this way."""


class TransferError(PagerError):
    """Bytes could not be moved between tiers.

    Attributes:
        errno: the operating system's error number, or None where the engine gave only text.
    """

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno
