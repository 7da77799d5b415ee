"""Weight gradients that a pipeline computes later than input gradients.

Zero-bubble schedules (Qi et al., arXiv:2401.10241) run a backward pass in two halves.  The previous
stage waits for the first half only, the gradient of the stage's input (I), so the weight gradients
(W) can fill the gaps of a schedule.  Autograd cannot split every graph: a compiled block computes
all its gradients at once, and recomputed activations exist only once.  So weft splits linear
layers, whose weight gradients take a third of the step.  All other gradients belong to I.

A linear layer gets two *extra inputs*: tensors with shapes, but without memory.  As "gradients" of
these, the layer returns the two factors of its weight gradient: its own input and the gradient of
its output.  The backward function of the extra inputs keeps the factors until W multiplies them.
To autograd, the compiler and activation checkpointing they are inputs like any other, so I is one
ordinary backward pass.  A compiled block gets its extra inputs from outside.

From I to W, only the factors are kept, in the compute dtype, and W needs no weights.  Megatron-LM
(``delay_wgrad_compute``) and TransformerEngine (``WeightGradStore``) keep the same factors.

Float8 layers, and the head with a fused loss, compute their weight gradients in I.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from weft.models.layers import linear, run_function, weight_gradient
from weft.models.moe import ExpertLinear
from weft.parallel.float8 import is_float8_expert


class WeightGradients:
    """The weight gradients that one stage has not computed yet.

    Attributes:
        is_deferred: True in the first half of a backward pass.
        pending: each weight, with a function that returns its gradient.
    """

    is_deferred = False

    def __init__(self) -> None:
        self.pending: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def collect(self) -> Callable[[], None]:
        """Return a function that adds the pending gradients to ``.grad``."""
        pending, self.pending = self.pending, []

        @torch.no_grad()
        def add_to_grad() -> None:
            while pending:  # from the first layer to the last
                weight, gradient = pending.pop()
                if weight.is_leaf and weight.grad is None:
                    # Autograd would copy it.  From torch 2.15 on, FSDP lets weights accept only
                    # gradients in the dtype of the reduction.
                    value, dtype = gradient(), getattr(weight, "grad_dtype", None)
                    weight.grad = value if dtype is None else value.to(dtype)
                else:
                    torch.autograd.backward(weight, gradient())

        return add_to_grad


class _ExtraInputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, module: Any, counts: Any, x_shape: Any, grad_shape: Any
    ) -> Any:
        ctx.options = weight, module.weight_gradients, counts
        return tuple(weight.new_empty(()).expand(shape) for shape in (x_shape, grad_shape))

    @staticmethod
    def backward(ctx: Any, x: Tensor, grad: Tensor) -> Any:
        weight, gradients, counts = ctx.options
        # Detached, because a graph of the input would keep the activations before it.
        gradient = partial(weight_gradient, x.detach(), grad, *counts)
        # Anomaly mode finds NaN only in what a backward function returns.
        if not gradients.is_deferred or torch.is_anomaly_enabled():
            return gradient(), None, None, None, None
        gradients.pending.append((weight, gradient))
        return None, None, None, None, None


class _WithExtraInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, x_tap: Tensor, grad_tap: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return out.detach()  # not a view, which FSDP and pipelines do not support

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, *ctx.saved_tensors, grad


def defer_weight_gradients(model: nn.Module) -> None:
    """Let the linear layers of ``model`` defer their weight gradients.

    Call it when all layers are in place, and before they are compiled or recomputed.  It adds
    ``model.weight_gradients``, a `WeightGradients`.
    """
    gradients = vars(model)["weight_gradients"] = WeightGradients()
    for module in model.modules():
        is_linear = type(module).forward in (nn.Linear.forward, ExpertLinear.forward)
        if is_linear and not is_float8_expert(module):
            # One function for all layers, so that the compiler sees that blocks are alike.
            vars(module).update(forward=MethodType(_forward, module), weight_gradients=gradients)


def _forward(module: Any, x: Tensor, *counts: Tensor) -> Tensor:
    """Replace the forward of a linear layer, or of one per expert."""
    out = linear(x, module.weight.detach(), module.bias, *counts)
    if torch.is_grad_enabled() and module.weight.requires_grad:
        extra_inputs = vars(module).get("extra_inputs") or _make_extra_inputs(
            module, x.shape, *counts
        )
        return run_function(_WithExtraInputs, out, x, *extra_inputs)
    if not torch.compiler.is_compiling():
        vars(module)["input_shape"] = x.shape
    return out


def _make_extra_inputs(module: Any, shape: torch.Size, *counts: Tensor) -> Any:
    """Return the extra inputs of a layer for an input of ``shape``."""
    weight = module.weight
    return run_function(
        _ExtraInputs, weight, module, counts, shape, (*shape[:-1], weight.shape[-2])
    )


def add_inputs_to_compiled_block(block: Any) -> None:
    """Create the extra inputs of a compiled block before its forward.

    The compiler needs their shapes, so the first call also runs the block without the compiler.
    """
    modules = (layer for layer in block.modules() if isinstance(layer, nn.Linear))
    layers: list[Any] = [layer for layer in modules if hasattr(layer, "weight_gradients")]
    compiled = block.forward

    def forward(*args: Any) -> Any:
        if torch.is_grad_enabled():
            if not all(hasattr(layer, "input_shape") for layer in layers):
                with torch.no_grad():
                    type(block).forward(block, *args)
            for layer in layers:
                vars(layer)["extra_inputs"] = _make_extra_inputs(layer, layer.input_shape)
        return compiled(*args)

    if layers:
        block.forward = forward
