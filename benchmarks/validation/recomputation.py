"""Which operators of a layer a published run computes again in backward, by the names of its modules (`models.py`).

full                    every forward operator of a layer
core_attn               scores, softmax, dropout, weighted values (Korthikanti et al. 2022: "selective")
layernorm, mlp, moe, moe_act, shared_experts, mla_up_proj      Megatron's --recompute-modules
pointwise, second_matmul                                       torchtitan's selective mode: keeps every other product

"mlp" means dense layers alone (megatron/core/transformer/transformer_layer.py: not where the MLP is a MoELayer).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from benchmarks.validation.runs import ParallelShape

_PRODUCT = r"/(mm|addmm|bmm|expert_linear)#"
_DENSE = r"\.mlp[./]"
_PATTERNS = {
    "core_attn": r"\.attention\.core/",
    "layernorm": r"\.norm\d/",
    "mlp": "$^",
    "moe": r"\.mlp[./]",
    "moe_act": r"\.mlp/(silu|gelu|mul)#",
    "shared_experts": r"\.mlp\.shared[./]",
    "mla_up_proj": r"\.attention\.(query_up|kv_up|query_norm|kv_norm)/|\.attention/cat#",
    "pointwise": rf"^(?!.*(\.attention\.core/|{_PRODUCT}))",
    "second_matmul": rf"\.(attention\.out|mlp\.down){_PRODUCT}",
}


def computed_again(operators: Iterable[str], parallel: ParallelShape) -> frozenset[str]:
    """Of the names of a program's operators, those of layers that backward runs again."""
    if parallel.recompute == "none":
        return frozenset()
    modules = [_PATTERNS[module] for module in parallel.recompute_modules] if parallel.recompute != "full" else [""]
    pattern = re.compile("|".join(f"(?:{module})" for module in modules))
    dense = re.compile(_DENSE if "mlp" in parallel.recompute_modules and parallel.recompute != "full" else "$^")
    forward = [name for name in operators if name.startswith("layers.") and not name.endswith("/bwd")]
    routed = {_layer(name) for name in forward if ".mlp.router/" in name}
    return frozenset(
        name
        for name in forward
        if pattern.search(name) is not None or (_layer(name) not in routed and dense.search(name) is not None)
    )


def _layer(operator: str) -> str:
    return ".".join(re.split(r"[./]", operator, maxsplit=2)[:2])
