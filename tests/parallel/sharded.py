"""A small sharded model and its training step, for tests of data parallelism."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from weft.config.schema import ParallelSection
from weft.models.decoder import Decoder, blocks, fsdp_units
from weft.models.decoder_config import DecoderConfig
from weft.parallel.data_parallel import apply_fsdp, set_gradient_sync

# Only the norm weights divide evenly over every group, so other shards are padded.
CONFIG = DecoderConfig(
    num_layers=3,
    dim=24,
    num_heads=4,
    num_kv_heads=2,
    ffn_dim=42,
    vocab_size=61,
    max_seq_len=16,
    rope_scaling="none",
)
UNITS = 5  # the embedding, three blocks, the head with its norm
ROWS, TOKENS = 16, 12
AXES = ("dp_replicate", "dp_shard")
PERSIST = {
    "param_persistence_threshold": 100
}  # norm weights have 24 elements, matrices 288 or more


class Layout(NamedTuple):
    replicas: int = 1
    shards: int = 2
    reshard_after_forward: bool | int = True
    sync: str = "step"
    node_size: int | None = None
    activation_checkpoint: bool = False
    microbatches: int = 2
    compute: torch.dtype = torch.float32
    keys: dict[str, Any] = {}  # of ParallelSection  # noqa: RUF012 - never changed

    @property
    def ranks(self) -> int:
        return self.replicas * self.shards


# --------------------------------------------------------------------------- in a rank


def build_model() -> Decoder:
    """Build the same model on all ranks, with norm weights other than one."""
    torch.manual_seed(1)
    model = Decoder(CONFIG)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("norm.weight"):
                param.uniform_(0.5, 1.5)
    return model


def data() -> tuple[Tensor, Tensor]:
    """Tokens and targets, ``[ROWS, TOKENS]`` each."""
    generator = torch.Generator().manual_seed(2)
    shape = (2, ROWS, TOKENS)
    tokens_BT, targets_BT = torch.randint(CONFIG.vocab_size, shape, generator=generator)
    return tokens_BT, targets_BT


def loss_of(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return this rank's share of the mean loss of the batch."""
    flat = logits_BTV.flatten(0, 1).float()
    return F.cross_entropy(flat, targets_BT.flatten(), reduction="sum") / (ROWS * TOKENS)


def recompute(module: nn.Module) -> None:
    """Checkpoint a module's activations without changing parameter names."""
    module.forward = partial(checkpoint, module.forward, use_reentrant=False)


def build(layout: Layout, mesh: DeviceMesh | None = None, model: Decoder | None = None) -> Decoder:
    """Build the sharded model."""
    if mesh is None:
        mesh = init_device_mesh("cpu", (layout.replicas, layout.shards), mesh_dim_names=AXES)
    model = model or build_model()
    if layout.activation_checkpoint:
        for block in blocks(model):
            recompute(block)
    apply_fsdp(
        model,
        blocks(model),
        mesh,
        ParallelSection(**layout.keys),
        compute_dtype=layout.compute,
        reduce_dtype=torch.float32,
        reshard_after_forward=layout.reshard_after_forward,
        node_size=layout.node_size,
        units=fsdp_units(model),
    )
    return model


def step(model: Decoder, layout: Layout) -> Tensor:
    """Run forward and backward on this rank's sequences; return its loss share."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens_BT, targets_BT = (x[rank::ranks].chunk(layout.microbatches) for x in data())
    total = torch.zeros(())
    for i, (tokens, targets) in enumerate(zip(tokens_BT, targets_BT, strict=True)):
        set_gradient_sync(model, i == layout.microbatches - 1, layout.sync)  # type: ignore[arg-type]
        loss = loss_of(model(tokens), targets)
        loss.backward()
        total += loss.detach()
    return total


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    grads = {}
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor), f"{name} is still gathered"
        assert isinstance(param.grad, DTensor), f"{name} has no gradient"
        grads[name] = param.grad.full_tensor()
    return grads


class Seen(NamedTuple):
    """One recorded collective."""

    kind: str
    ranks: tuple[int, ...]  # ranks of the process group
    numel: int  # elements of the input
    dtype: torch.dtype


class Collectives(TorchDispatchMode):
    """Records every collective."""

    KINDS = ("reduce_scatter", "allgather", "allreduce")

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[Seen] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            kind = next(kind for kind in self.KINDS if kind in func.__name__)
            group = next(a for a in args if isinstance(a, torch.ScriptObject))
            ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
            # all_reduce, and all_gather of a list, take lists of tensors.
            inputs = args[0] if kind == "allreduce" else args[1]
            tensors = inputs if isinstance(inputs, list) else [inputs]
            numel = sum(tensor.numel() for tensor in tensors)
            self.recorded.append(Seen(kind, ranks, numel, tensors[0].dtype))
        return func(*args, **(kwargs or {}))


# --------------------------------------------------------------------------- one process


def one_process() -> dict[str, Any]:
    model = build_model()
    tokens_BT, targets_BT = data()
    loss = loss_of(model(tokens_BT), targets_BT)
    loss.backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    return {"loss": loss.item(), "grads": grads}


def assert_equal(many: dict[str, Any], one: dict[str, Any], tolerance: float = 2e-6) -> None:
    """Check gradients within ``tolerance`` of each one's largest element."""
    assert many["grads"].keys() == one["grads"].keys()
    for name, grad in one["grads"].items():
        scale = grad.abs().max()
        torch.testing.assert_close(
            many["grads"][name] / scale,
            grad / scale,
            rtol=0,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    if "loss" in many:
        assert many["loss"] == pytest.approx(one["loss"], rel=tolerance)
