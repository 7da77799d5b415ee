"""List the matrices for float8 and adapters, with their local sizes under tp."""

from __future__ import annotations

from torch import Tensor, nn

from weft.models import load_family
from weft.models.llama import PRESETS
from weft.plan.matrices import Matrix, find_linear_layers, list_matrices

TOY = PRESETS["toy"].model_copy(update={"num_layers": 1})


def test_list_matrices_sizes_are_those_of_a_rank() -> None:
    kinds = ("q", "k", "v", "o", "gate", "up", "down")
    unsharded, half = (list_matrices(TOY, load_family("llama"), tp) for tp in (1, 2))
    assert [m.name.rpartition(".")[2] for m in unsharded] == [f"{kind}_proj" for kind in kinds]
    for kind, full, cut in zip(kinds, unsharded, half, strict=True):
        row = kind in ("o", "down")
        outputs, inputs = (
            full.out_features // (1 if row else 2),
            full.in_features // (2 if row else 1),
        )
        assert cut == Matrix(full.name, outputs, inputs)
    # Four ranks share two key heads.
    assert TOY.num_kv_heads == 2
    shared = list_matrices(TOY, load_family("llama"), 4)
    assert [m.out_features for m in shared[:3]] == [
        unsharded[0].out_features // 4,
        unsharded[1].out_features // 2,
        unsharded[2].out_features // 2,
    ]


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_linear_layers_layer_with_a_custom_forward_is_left_out() -> None:
    """Neither float8 nor an adapter may replace it."""
    block = nn.Sequential(nn.Linear(4, 4), Doubled(4, 4))
    model = nn.ModuleDict({"block": block, "head": nn.Linear(4, 4)})
    assert find_linear_layers(model, [block]).keys() == {"block.0"}
