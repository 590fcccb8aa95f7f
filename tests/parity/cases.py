"""Every program of the suite by name, so that the budgets of all of them can be checked."""

from __future__ import annotations

from tests.parity.programs import MLP, Experts, Graph, Program
from tests.parity.programs_autograd import (
    Complex,
    Functional,
    Functions,
    GradientPenalty,
    Hooks,
    Reparametrized,
    RetainedGraph,
    Sparse,
    UpdateInBackward,
    Views,
)
from tests.parity.programs_text import Generation, HuggingFace, MiniLM, Recurrent, Seq2Seq
from tests.parity.programs_training import (
    Accumulation,
    Alternating,
    Autocast,
    Averaged,
    Checkpointed,
    Clip,
    Closure,
    Copied,
    Frozen,
    OtherThread,
    Recast,
    Resumed,
    SavedOnCpu,
    Scaled,
    Scheduled,
    Tied,
)
from tests.parity.programs_vision import Autoencoder, ChannelsLastCNN, ViT

TRANSFORMS = ("functional_call", "grad", "vmap", "jvp", "vjp", "hessian")

MODELS: dict[str, Program] = {
    "mlp": MLP(),
    "cnn-2d": ChannelsLastCNN(),
    "cnn-3d": ChannelsLastCNN(dimensions=3),
    "autoencoder": Autoencoder(),
    "lstm": Recurrent(),
    "lstm-packed": Recurrent(packed=True),
    "gru": Recurrent(kind="gru"),
    "seq2seq": Seq2Seq(),
    "graph": Graph(),
    "experts": Experts(),
    "llama": HuggingFace(),
    "llama-tied": HuggingFace(tied=True, attention="eager"),
    "gpt2": HuggingFace(family="gpt2"),
    "bert": HuggingFace(family="bert"),
    "vit": ViT(),
    "minilm": MiniLM(),
    "llama-generate": Generation(),
    "gpt2-generate": Generation(family="gpt2"),
}

TRAINING: dict[str, Program] = {
    "clip": Clip(),
    "clip-foreach": Clip(foreach=True),
    "clip-loop": Clip(foreach=False),
    "clip-inf": Clip(norm_type=float("inf")),
    "clip-value": Clip(by_value=True),
    "scaler": Scaled(),
    "scaler-fused": Scaled(fused=True),
    "accumulation": Accumulation(),
    "accumulation-zeros": Accumulation(set_to_none=False),
    "schedule-lambda": Scheduled(),
    "schedule-one-cycle": Scheduled(schedule="one_cycle"),
    "schedule-plateau": Scheduled(schedule="plateau"),
    "schedule-cosine": Scheduled(schedule="cosine"),
    "checkpoint": Checkpointed(),
    "checkpoint-reentrant": Checkpointed(use_reentrant=True),
    "save-on-cpu": SavedOnCpu(),
    "autocast": Autocast(),
    "autocast-checkpoint": Autocast(checkpointed=True),
    "tied": Tied(),
    "frozen": Frozen(),
    "unfrozen-by-add-param-group": Frozen(unfreeze=True),
    "deepcopy": Copied(),
    "averaged": Averaged(),
    "resume-file": Resumed(),
    "resume-memory": Resumed(through_file=False),
    "resume-assign": Resumed(assign=True),
    "recast": Recast(),
    "alternating": Alternating(),
    "other-thread": OtherThread(),
    "lbfgs-closure": Closure(),
}

AUTOGRAD: dict[str, Program] = {
    "retain-graph": RetainedGraph(),
    "double-backward": GradientPenalty(),
    "views": Views(),
    "functions": Functions(),
    "hooks": Hooks(),
    "update-in-backward": UpdateInBackward(),
    "reparametrized": Reparametrized(),
    "complex": Complex(),
    "sparse": Sparse(),
    **{f"func-{transform}": Functional(transform=transform) for transform in TRANSFORMS},
}
