"""Float8 training: linear layers multiply 8-bit numbers, at twice the speed.

Float8 has 3 mantissa bits (e4m3, up to 448) or 2 (e5m2, up to 57344, for gradients).  This suffices
for the factors of a matmul with high-precision accumulation, if they are *scaled* to the narrow
range first (Micikevicius et al., arXiv:2209.05433).  A linear layer has three matmuls: output,
input gradient and weight gradient.  Before each, both factors are multiplied by the format's
maximum over their largest magnitude, and cast.  Weights, gradients, optimizer states and
activations keep their dtypes, and checkpoints are the same as without float8.  The recipe defines
the numbers that share a scale:

    tensorwise          a full matrix; the fastest
    rowwise             a row (or column); an outlier affects only its row
    rowwise_with_gw_hp  like rowwise, with weight gradients in high precision
    mxfp8               32 numbers, a power-of-two scale (OCP Microscaling Formats, v1.0); SM100

*Any layout, same numbers.*  Scales differ between layouts: a tensor-parallel rank scales its shard,
and a microbatch its own numbers.  Results do not differ, because all scales are rounded down to
powers of two, which change a number's exponent but not its mantissa.  The exception are numbers so
much smaller than the largest (about 2**-14 for e4m3) that they become subnormal.

*Files.*  Read `linear_layers` first: it converts a model.

    linear_layers    converts linear layers with torchao, sets what the compiler needs
    experts          grouped GEMMs in float8
    frozen_linear    products of frozen matrices, under adapters (`weft.parallel.lora`)
    weight_gather    FSDP gathers weights that are already cast (*tensorwise*)
    sequence_gather  tensor-parallel ranks gather activations that are already cast (*tensorwise*)

`weft.planning.matrices` chooses the layers.

Code outside of this directory imports only the names below.  Two of them are functions here,
because their modules import torchao, which takes seconds.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from weft.parallel.collectives import Collective
from weft.parallel.float8.frozen_linear import frozen_float8_linear
from weft.parallel.float8.linear_layers import (
    apply_float8,
    import_quietly,
    is_float8_expert,
    prepare_compiler,
)
from weft.parallel.float8.weight_gather import Float8AllGather

__all__ = [
    "Float8AllGather",
    "apply_float8",
    "find_float8_exchanges",
    "find_joint_float8_product",
    "frozen_float8_linear",
    "import_quietly",
    "is_float8_expert",
    "prepare_compiler",
]


def find_float8_exchanges(
    layers: Sequence[Any], group: dist.ProcessGroup
) -> tuple[Collective, Collective] | None:
    """Return the collectives of float8 layers; see `sequence_gather.find_exchanges`."""
    from weft.parallel.float8.sequence_gather import find_exchanges

    return find_exchanges(layers, group)


def find_joint_float8_product(layers: Sequence[Any]) -> Callable[..., Sequence[Tensor]] | None:
    """Return one product for float8 layers; see `sequence_gather.find_joint_product`."""
    from weft.parallel.float8.sequence_gather import find_joint_product

    return find_joint_product(layers)
