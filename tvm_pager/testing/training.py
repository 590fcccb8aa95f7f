"""A training step as a trace, of any size: layers forth and back, then updates."""

from __future__ import annotations

from tvm_pager.planning import PageKind, Phase, Trace, TraceOp, TracePage

__all__ = ["training_trace"]


def training_trace(
    num_layers: int = 4,
    *,
    num_small_ops: int = 2,
    num_update_ops: int = 2,
    nbytes: int = 1 << 20,
    compute_ns: int = 100_000,
) -> Trace:
    """A steady iteration: activations wait for backward, gradients for the next iteration.

    Args:
        num_layers: each has a weight and two optimizer states.
        num_small_ops: after each layer's large operation, going forth; twice as many going back.
        num_update_ops: on each weight, its gradient and its states.
        nbytes: of each page.
        compute_ns: of each large operation; a small one takes a tenth.
    """
    step = _Step(num_layers, nbytes, compute_ns)
    for layer in range(num_layers):
        step.forward(layer, num_small_ops)
    step.loss()
    for layer in reversed(range(num_layers)):
        step.backward(layer)
    for layer in range(num_layers):
        for _ in range(num_update_ops):
            step.update(layer)
    return step.trace()


class _Step:
    def __init__(self, num_layers: int, nbytes: int, compute_ns: int) -> None:
        self._nbytes, self._compute_ns = nbytes, compute_ns
        self._ops: list[TraceOp] = []
        self._pages: list[TracePage] = []
        self._modules = tuple(f"layers.{layer}" for layer in range(num_layers))
        self._weights = [self._lasting(PageKind.PARAM, f"{name}.weight") for name in self._modules]
        self._states = [
            (self._lasting(PageKind.OPT_STATE), self._lasting(PageKind.OPT_STATE))
            for _ in range(num_layers)
        ]
        # Those of the iteration before die when this one begins.
        self._old_grads = [
            self._page(TracePage(nbytes, PageKind.GRAD, "float32", died=1))
            for _ in range(num_layers)
        ]
        self._grads: dict[int, int] = {}
        self._op("test::zero_grad", (), Phase.OTHER, -1, is_small=True)
        self._input = self._op("test::input", (), Phase.FORWARD, -1, True)
        self._saved: list[list[int]] = []  # by layer: the input of each of its operations

    def forward(self, layer: int, num_small_ops: int) -> None:
        saved = [self._input]
        operands = (self._weights[layer], self._input)
        self._input = self._op("test::mm", operands, Phase.FORWARD, layer)
        for _ in range(num_small_ops):
            saved.append(self._input)
            self._input = self._op("test::small", (self._input,), Phase.FORWARD, layer, True)
        self._saved.append(saved)

    def loss(self) -> None:
        output, self._input = self._input, self._op("test::loss", (self._input,), Phase.FORWARD, -1)
        self._die(output)

    def backward(self, layer: int) -> None:
        """Takes the gradient in `self._input` through the layer, and makes the weight's."""
        first, *others = self._saved.pop()
        for saved in reversed(others):
            for _ in range(2):
                self._pass_back((self._input, saved), layer, is_small=True)
            self._die(saved)
        self._grads[layer] = self._op("test::mm", (self._input, first), Phase.BACKWARD, layer)
        kind = self._pages[self._grads[layer]]._replace(kind=PageKind.GRAD)
        self._pages[self._grads[layer]] = kind._replace(becomes=self._old_grads[layer])
        self._pass_back((self._input, self._weights[layer]), layer)
        self._die(first)
        if not layer:
            self._die(self._input)

    def update(self, layer: int) -> None:
        written = (self._weights[layer], *self._states[layer])
        operands = (*written, self._grads[layer])
        self._ops.append(
            TraceOp(
                "test::update",
                operands,
                written,
                (),
                self._compute_ns // 10,
                phase=Phase.UPDATE,
                module=layer,
            )
        )

    def trace(self) -> Trace:
        return Trace(tuple(self._ops), tuple(self._pages), self._modules, launch_ns=5000)

    def _pass_back(self, operands: tuple[int, int], layer: int, *, is_small: bool = False) -> None:
        output = self._op("test::back", operands, Phase.BACKWARD, layer, is_small)
        self._die(self._input)
        self._input = output

    def _op(
        self, name: str, reads: tuple[int, ...], phase: Phase, layer: int, is_small: bool = False
    ) -> int:
        """Appends an operation with one result, and gives the number of that."""
        index, kind = len(self._ops), PageKind.ACTIVATION
        if phase is Phase.BACKWARD:
            kind = PageKind.TEMPORARY
        created: tuple[int, ...] = ()
        result = -1
        if phase is not Phase.OTHER:
            result = self._page(TracePage(self._nbytes, kind, "float32", born=index))
            created = (result,)
        took_ns = self._compute_ns // 10 if is_small else self._compute_ns
        op = TraceOp(name, reads, (), created, took_ns, 0, phase, layer, bool(reads))
        self._ops.append(op)
        return result

    def _lasting(self, kind: PageKind, name: str = "") -> int:
        number = len(self._pages)
        return self._page(TracePage(self._nbytes, kind, "float32", name, None, None, number))

    def _page(self, page: TracePage) -> int:
        self._pages.append(page)
        return len(self._pages) - 1

    def _die(self, number: int) -> None:
        self._pages[number] = self._pages[number]._replace(died=len(self._ops))
