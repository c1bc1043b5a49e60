"""A plan as torch code: a Python file whose `parallelize(model)` calls FSDP2 and `parallelize_module`.

    autopar export plan.json --to fsdp2 -o sharded.py
    model = sharded.parallelize(model, "cuda")             # under torchrun; the mesh has the plan's sizes

What lies where follows from the plan: modules with a number in their names ("layers.0") are gathered one by one, and a
layer whose product splits columns (contracted dims) over tensor parallelism becomes ColwiseParallel (RowwiseParallel).
Outputs of a column-split layer stay split where a row-split layer of the same module reads them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, TypeAlias

from autopar.exporters.uniform import UniformPlan, cannot
from autopar.plans.parallel_plan import Plan
from autopar.plans.parallelism import axis_roles, kind_of

Style: TypeAlias = Literal["columns", "rows", "vocabulary", "features"]
STYLES: Mapping[tuple[str, str], Style] = {
    ("mm", "n"): "columns", ("mm", "k"): "rows", ("embedding", "v"): "vocabulary", ("embedding", "d"): "features",
}  # fmt: skip
"""(operator, name that tensor parallelism splits) -> how the module is cut."""
JOINED = {"linear_cross_entropy": "the product with the vocabulary", "tiled_mlp": "the products of an MLP"}
"""Kinds of kernels that hold products -> which."""
NUMBERED = re.compile(r"(?:.*?\.)??\d+(?=\.)")


def fsdp2(plan: Plan, uniform: UniformPlan) -> tuple[str, list[str]]:
    """The file for data parallelism, over the ranks of tensor parallelism where the plan has some."""
    lost = cannot(uniform, "cp", "ep", "pp")
    styles, style_lost = layer_styles(plan) if uniform.tp > 1 else ({}, [])
    if uniform.micro_batches > 1:
        lost.append(f"{uniform.micro_batches} micro-batches: accumulate gradients in the training loop")
    if uniform.recompute != "none":
        lost.append(f"recomputation ({uniform.recompute}) is switched on in the model, not here")
    names, sizes = ["dp_shard"], [uniform.dp_shard * uniform.cp * uniform.ep if uniform.zero_stage else 1]
    replicas = uniform.dp_replicate if uniform.zero_stage else uniform.data_ranks
    if replicas > 1:
        names, sizes = ["dp_replicate", *names], [replicas, *sizes]
    data = tuple(names)
    if uniform.tp > 1:
        names, sizes = [*names, "tp"], [*sizes, uniform.tp]
    options = _options(uniform, data)
    lines = [
        *_imports(styles, options),
        *_style_table(styles),
        f"LAYERS = {_blocks(plan)!r}",
        "",
        "",
        'def parallelize(model, device_type="cuda"):',
        f'    """FSDP2 over {uniform.data_ranks} ranks; each passes its part of the batch."""',
        f"    mesh = init_device_mesh(device_type, {tuple(sizes)}, mesh_dim_names={tuple(names)})",
        *(['    parallelize_module(model, mesh["tp"], STYLES)'] if styles else []),
        f"    options = {options}",
        "    for name in LAYERS:",
        "        fully_shard(model.get_submodule(name), **options)",
        "    return fully_shard(model, **options)",
    ]
    return "\n".join(lines) + "\n", [*lost, *style_lost]


def parallelize_plan(plan: Plan, uniform: UniformPlan) -> tuple[str, list[str]]:
    """The file for tensor parallelism alone."""
    lost = cannot(uniform, "dp_replicate", "dp_shard", "cp", "ep", "pp")
    styles, style_lost = layer_styles(plan)
    lines = [
        *_imports(styles),
        *_style_table(styles),
        "",
        "",
        'def parallelize(model, device_type="cuda"):',
        f'    """Tensor parallelism over {uniform.tp} ranks; each passes the whole batch."""',
        f'    mesh = init_device_mesh(device_type, ({uniform.tp},), mesh_dim_names=("tp",))',
        "    return parallelize_module(model, mesh, STYLES)" if styles else "    return model",
    ]
    if uniform.sequence_parallel:
        lost.append("sequence parallelism: activations between layers are whole here")
    return "\n".join(lines) + "\n", [*lost, *style_lost]


def layer_styles(plan: Plan) -> tuple[dict[str, Style], list[str]]:
    """How every layer is cut over the axes of tensor parallelism, and what torch's styles cannot say. A head whose
    product is part of the loss is no operator of its module."""
    axes = [axis for axis, role in enumerate(axis_roles(plan)) if role == "tp"]
    styles: dict[str, Style] = {}
    others: list[str] = []
    lost: list[str] = []
    for name, operator in plan.operators.items():
        module, kind = name.partition("/")[0], kind_of(name)
        if kind in JOINED and any(operator.axes[axis] is not None for axis in axes):
            lost.append(
                f"{name} holds {JOINED[kind]}, which tensor parallelism splits; here its layers stay whole: plan with "
                f"kernels=('rms_norm', 'gated', 'rope', 'cross_entropy') or others, without {kind!r}, to have them cut"
            )
        if name.endswith("/bwd") or kind not in ("mm", "embedding") or f"{module}.weight" not in plan.parameters:
            continue
        splits = {operator.axes[axis] for axis in axes}
        split = splits.pop() if len(splits) == 1 else "several"
        if split is None:
            continue
        style = STYLES.get((kind, split))
        if style is None:
            others.append(f"{name} splits {split}")
        else:
            styles[module] = style
    if not others:
        return styles, lost
    whole = f"{len(others)} layers stay whole over tensor parallelism here, not in the plan (as {others[0]})"
    return styles, [*lost, whole]


def _options(uniform: UniformPlan, data: tuple[str, ...]) -> str:
    axes = repr(data if len(data) > 1 else data[0])
    words = [f"mesh=mesh[{axes}]", f"reshard_after_forward={uniform.zero_stage == 3}"]
    if uniform.precision == "bf16":
        words.append("mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)")
    return f"dict({', '.join(words)})"


def _blocks(plan: Plan) -> list[str]:
    """The modules that are gathered one by one: those whose name ends in the first number of a parameter's name."""
    found = (NUMBERED.match(name) for name in plan.parameters)
    return list(dict.fromkeys(match[0] for match in found if match is not None))


def _imports(styles: Mapping[str, Style], options: str = "") -> list[str]:
    """options: the arguments of fully_shard, where it is called."""
    lines = ['"""Written by `autopar export`; run it under torchrun."""', ""]
    if "torch." in options:
        lines.append("import torch")
    lines.append("from torch.distributed.device_mesh import init_device_mesh")
    if options:
        policy = "MixedPrecisionPolicy, " if "MixedPrecisionPolicy" in options else ""
        lines.append(f"from torch.distributed.fsdp import {policy}fully_shard")
    if styles:
        lines += [
            "from torch.distributed.tensor import Replicate",
            "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module",
        ]
    return [*lines, ""]


def _style_table(styles: Mapping[str, Style]) -> list[str]:
    if not styles:
        return []
    inside = {"columns": set[str](), "rows": set[str]()}
    for module, style in styles.items():
        if style in inside:
            inside[style].add(module.rpartition(".")[0])
    lines = [f"    {module!r}: {_style(style, module.rpartition('.')[0], inside)}," for module, style in styles.items()]
    return ["STYLES = {", *lines, "}"]


def _style(style: Style, parent: str, inside: Mapping[str, set[str]]) -> str:
    """The call that cuts a layer. A pair of columns and rows in one module keeps what is between them split."""
    if style == "columns":
        return "ColwiseParallel()" if parent in inside["rows"] else "ColwiseParallel(output_layouts=Replicate())"
    if style == "rows":
        whole = "RowwiseParallel(input_layouts=Replicate())"
        return "RowwiseParallel()" if parent in inside["columns"] else whole
    if style == "vocabulary":
        return "RowwiseParallel(input_layouts=Replicate())"
    return "ColwiseParallel(output_layouts=Replicate())"
