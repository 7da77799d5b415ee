"""Mixed precision on one rank: forward and backward use copies of the parameters.

Several ranks gather parameters in the compute dtype with FSDP.  One rank has nothing to gather.
FSDP would still copy each parameter twice in every pass, and sum the gradients of a step beside
those of its shards.  Here a step copies each parameter once, and backward adds the gradient of the
copy to that of the parameter.  The results equal those of FSDP, bit for bit, as long as
``precision.reduce_dtype`` is float32.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.parallel.step_hook import StepHook


class ComputeCopies(StepHook):
    """Copies of a model's parameters in ``dtype``.

    They replace the parameters from a forward pass of ``model``, or from the passes of a step,
    until `restore_parameters`.

    Args:
        model: module that is called for a forward pass.
        dtype: floating dtype of forward and backward.
        excluded: names of modules that cast their parameters themselves.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, excluded: Collection[str] = ()
    ) -> None:
        self.dtype, self.excluded, self.in_use = dtype, excluded, False
        self.copies: dict[nn.Parameter, nn.Parameter] = {}
        self.model = model
        vars(model)["compute_copies"] = self
        model.register_forward_pre_hook(self.use, prepend=True)

    @torch.no_grad()
    def use(self, model: nn.Module, args: Any = ()) -> None:
        """Update the copies, and replace the parameters by them, unless they are in use."""
        if self.in_use:
            return
        self.in_use = True
        if self.copies:
            torch._foreach_copy_(list(self.copies.values()), list(self.copies))
        else:  # parameters are allocated by now
            modules = map(model.get_submodule, self.excluded)
            excluded = {param for module in modules for param in module.parameters()}
            for param in model.parameters():
                needs_cast = param.is_floating_point() and param.dtype != self.dtype
                if needs_cast and param not in excluded:
                    self.copies[param] = self._copy(param)
        _replace_parameters(model, self.copies)

    def begin_passes(self, num_sequences: Tensor) -> None:
        """Use the copies for all microbatches: backward needs them, too."""
        self.use(self.model)

    def end_passes(self) -> bool:
        """Restore the parameters."""
        restore_parameters(self.model)
        return False

    def abandon(self) -> None:
        """Restore the parameters."""
        restore_parameters(self.model)

    def _copy(self, param: nn.Parameter) -> nn.Parameter:
        copy = nn.Parameter(param.to(self.dtype), param.requires_grad)
        if param.requires_grad:
            hook: Any = partial(_add_gradient, param)
            copy.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return copy


def restore_parameters(model: nn.Module) -> None:
    """Replace the copies of `ComputeCopies`, if there are any, by the parameters."""
    if copies := vars(model).get("compute_copies"):
        copies.in_use = False
        _replace_parameters(model, {copy: param for param, copy in copies.copies.items()})


def _replace_parameters(model: nn.Module, others: Mapping[nn.Parameter, nn.Parameter]) -> None:
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = others.get(param, param)


def _add_gradient(param: nn.Parameter, copy: Tensor) -> None:
    """Move the gradient of a copy to its parameter; in backward, when it is complete."""
    gradient, copy.grad = copy.grad, None
    assert gradient is not None
    if param.grad is None:
        param.grad = gradient.to(param.dtype)
    else:
        param.grad += gradient
