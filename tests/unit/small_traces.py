"""Traces by hand: pages with names, operations in order, and a small training iteration."""

from __future__ import annotations

from tvm_pager.planning import PageKind, Phase, Trace, TraceOp, TracePage

__all__ = ["ENDLESS", "Program", "training"]

ENDLESS = 1 << 50  # bytes


class Program:
    """Writes a trace down. Pages are named; sizes are in units of 512 bytes."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self._ops: list[TraceOp] = []
        self._pages: list[TracePage] = []
        self._modules: list[str] = []

    def page(self, name: str, size: int, kind: PageKind = PageKind.PARAM) -> None:
        """A page that lives through the iteration."""
        number = self._new(name, TracePage(size * 512, kind, "torch.float32", name))
        self._pages[number] = self._pages[number]._replace(becomes=number)

    def op(
        self,
        reads: str = "",
        creates: dict[str, tuple[int, PageKind]] | None = None,
        writes: str = "",
        *,
        ns: int = 1000,
        phase: Phase = Phase.FORWARD,
        module: str = "",
        workspace: int = 0,
        is_replayable: bool | None = None,
    ) -> int:
        """Appends an operation and gives its index. Names are divided by spaces."""
        index = len(self._ops)
        created = tuple(
            self._new(name, TracePage(size * 512, kind, "torch.float32", "", born=index))
            for name, (size, kind) in (creates or {}).items()
        )
        written = tuple(self.numbers[name] for name in writes.split())
        read = (*(self.numbers[name] for name in reads.split()), *written)
        if module not in self._modules:
            self._modules.append(module)
        if is_replayable is None:
            is_replayable = not written
        self._ops.append(
            TraceOp(
                f"op{index}",
                tuple(dict.fromkeys(read)),
                written,
                created,
                ns,
                workspace * 512,
                phase,
                self._modules.index(module),
                is_replayable,
            )
        )
        return index

    def free(self, *names: str) -> None:
        """The pages are dead from here on."""
        for name in names:
            number = self.numbers[name]
            self._pages[number] = self._pages[number]._replace(died=len(self._ops), becomes=None)

    def build(self) -> Trace:
        """The trace."""
        return Trace(tuple(self._ops), tuple(self._pages), tuple(self._modules))

    def _new(self, name: str, page: TracePage) -> int:
        self.numbers[name] = len(self._pages)
        self._pages.append(page)
        return self.numbers[name]


def training(
    num_layers: int = 4, *, weight: int = 8, activation: int = 16, ns: int = 1000
) -> Program:
    """One iteration of a chain of layers: forward, backward, one update per layer.

    Layer i has the weight `w<i>` and states `m<i>`, `v<i>` of one size, reads the activation
    `a<i>`, makes an inner one `b<i>` and the next `a<i+1>`; backward reads `a<i>` and `b<i>` and
    makes the gradient `g<i>` of the weight and `d<i>` of the input.
    """
    act, param = PageKind.ACTIVATION, PageKind.PARAM
    program = Program()
    for i in range(num_layers):
        program.page(f"w{i}", weight, param)
    for i in range(num_layers):
        program.page(f"m{i}", weight, PageKind.OPT_STATE)
        program.page(f"v{i}", weight, PageKind.OPT_STATE)
    program.op(creates={"a0": (activation, act)}, ns=ns, module="embed", is_replayable=False)
    for i in range(num_layers):
        module = f"model.layers.{i}"
        program.op(f"a{i} w{i}", {f"b{i}": (activation, act)}, ns=ns, module=module + ".up")
        program.op(f"b{i} w{i}", {f"a{i + 1}": (activation, act)}, ns=ns, module=module + ".down")
    last = num_layers
    temporary = PageKind.TEMPORARY
    back = Phase.BACKWARD
    program.op(f"a{last}", {f"d{last}": (activation, temporary)}, ns=ns, phase=back, module="loss")
    program.free(f"a{last}")
    for i in reversed(range(num_layers)):
        module = f"model.layers.{i}"
        program.op(
            f"d{i + 1} b{i} w{i}",
            {f"e{i}": (activation, temporary), f"g{i}": (weight, PageKind.GRAD)},
            ns=2 * ns,
            phase=back,
            module=module + ".down",
        )
        program.free(f"d{i + 1}", f"b{i}")
        program.op(
            f"e{i} a{i} w{i}",
            {f"d{i}": (activation, temporary)},
            f"g{i}",
            ns=2 * ns,
            phase=back,
            module=module + ".up",
        )
        program.free(f"e{i}", f"a{i}")
    program.free("d0")
    for i in range(num_layers):
        module = f"model.layers.{i}"
        program.op(
            f"g{i}", writes=f"m{i} v{i} w{i}", ns=ns // 10, phase=Phase.UPDATE, module=module
        )
        program.free(f"g{i}")
    return program
