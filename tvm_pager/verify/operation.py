"""Traced operations of two runs side by side, and the first that differs. Pure; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Operation", "OperationDifference", "find_difference"]

_WINDOW = 64  # operations that one run may have and the other not, in one place
_NUM_IN_STEP = 3  # operations in a row that must be the same for the runs to count as in step
_Tensor = tuple[str, tuple[int, ...], str]  # dtype, shape, digest


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation.

    Attributes:
        name: of the operator, such as "aten.addmm.default".
        module: path of the module whose forward is under way.
        node: name of the autograd node that runs it, in backward.
        operands: dtype, shape and digest of each tensor or number, before the operation.
        results: the same afterwards.
        stack: lines of the script, the innermost first.
    """

    name: str
    module: str
    node: str
    operands: list[_Tensor]
    results: list[_Tensor]
    stack: list[str]

    def to_list(self) -> list[Any]:
        """The fields in their order, ready for JSON."""
        return [self.name, self.module, self.node, self.operands, self.results, self.stack]

    @classmethod
    def from_list(cls, values: list[Any]) -> Self:
        """Reads what `to_list` gave, after JSON."""
        name, module, node, operands, results, stack = values
        return cls(name, module, node, _tensors(operands), _tensors(results), stack)

    def is_same(self, other: Operation) -> bool:
        """Whether both are the same operation of the program, whatever their numbers are.

        Results of other shapes but the same bytes will do: a paged `deepcopy` clones storages.
        """
        if self.name != other.name:
            return False
        kinds = [[result[:2] for result in one.results] for one in (self, other)]
        digests = [[result[2] for result in one.results] for one in (self, other)]
        return kinds[0] == kinds[1] or digests[0] == digests[1]


@dataclass(frozen=True, slots=True)
class OperationDifference:
    """The first operation that differs.

    Attributes:
        index: counted from 1 within the step, as the plain run has them; with "more" as the paged
            run has them.
        operation: of the plain run, or with "more" of the paged run.
        kind: "operand" where its operands differ already, "result" where only its results do,
            "program" where the paged run has another operation, "extra" where what differs is the
            result of an operation, `other`, that only the paged run has, and "more" where only
            the paged run has it, and its result is what is wrong.
        position: of the operand or result, from 0.
        other: the paged run's operation; None where it has no more.
    """

    index: int
    operation: Operation
    kind: str
    position: int = 0
    other: Operation | None = None


def find_difference(
    plain: Sequence[Operation],
    again: Sequence[Operation],
    paged: Sequence[Operation],
    wrong: str = "",
) -> OperationDifference | None:
    """Compares a paged run with a plain one; None if no operation differs.

    What differs between the two plain runs, such as workspaces that nobody fills, is left out.
    `wrong` is the digest of a tensor that the paged run has and the plain one has not: an operation
    with that result counts where only the paged run has it.
    """
    extra: dict[str, Operation] = {}  # by digest of a result; operations that only paged has
    for index, other, skipped in _align(plain, paged):
        extra |= {result[2]: one for one in skipped for result in one.results}
        if index == len(plain):
            break
        operation = plain[index]
        if other is None or not operation.is_same(other):
            return OperationDifference(index + 1, operation, "program", other=other)
        same = again[index] if index < len(again) else operation
        if not same.is_same(operation):
            same = operation
        for kind in ("operand", "result"):
            digests = ([t[2] for t in getattr(one, kind + "s")] for one in (operation, same, other))
            for position, (mine, mine_again, theirs) in enumerate(zip(*digests, strict=False)):
                if mine != mine_again or mine == theirs:
                    continue
                if kind == "operand" and (source := extra.get(theirs)) is not None:
                    return OperationDifference(index + 1, operation, "extra", position, source)
                return OperationDifference(index + 1, operation, kind, position, other)
    if (source := extra.get(wrong)) is not None:
        return OperationDifference(paged.index(source) + 1, source, "more", other=source)
    return None


def _align(
    plain: Sequence[Operation], paged: Sequence[Operation]
) -> Iterator[tuple[int, Operation | None, Sequence[Operation]]]:
    """Pairs operations that are the same, each with what was skipped of the paged run before it.

    The last pair may be of different operations, or of none.
    """
    mine = theirs = 0
    while mine < len(plain):
        if theirs == len(paged):
            yield mine, None, ()
            return
        start = theirs
        if not plain[mine].is_same(paged[theirs]):
            skip = _resync(plain, mine, paged, theirs)
            if skip is None:
                yield mine, paged[theirs], ()
                return
            mine, theirs = mine + skip[0], theirs + skip[1]
        yield mine, paged[theirs], paged[start:theirs]
        mine, theirs = mine + 1, theirs + 1
    if theirs < len(paged):
        yield mine, None, paged[theirs:]


def _resync(
    plain: Sequence[Operation], mine: int, paged: Sequence[Operation], theirs: int
) -> tuple[int, int] | None:
    """The least to skip in either run so that the next operations are the same."""
    for total in range(1, _WINDOW + 1):
        for skip in range(total + 1):
            ours = plain[mine + skip : mine + skip + _NUM_IN_STEP]
            start = theirs + total - skip
            others = paged[start : start + _NUM_IN_STEP]
            if ours and others and all(map(Operation.is_same, ours, others)):
                return skip, total - skip
    return None


def _tensors(values: list[Any]) -> list[_Tensor]:
    return [(dtype, tuple(shape), digest) for dtype, shape, digest in values]
