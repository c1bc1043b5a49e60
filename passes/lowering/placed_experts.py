"""Placed experts: which parameters lie in the order in which a plan places the experts of a module.

    placed_weights(program)                 {"layers.0.experts": ("layers.0.experts.up", "layers.0.experts.down")}
    as_held(plan, program)                  the plan whose stored layouts say the order: S(0) -> S(0, order=0-3-1-2)

Those are the parameters of which products of the module take the experts, however they are cast, cut and transposed on
the way, and which nobody reads otherwise: what else has a dim of experts, as routers and biases that are looked up do,
lies as ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from autopar.errors import PlanMismatchError
from autopar.graphs.expert_loads import expert_counts, expert_products, module_of
from autopar.graphs.operator_names import base_name
from autopar.layouts.placement import Mesh, Shard, format_layout, in_order, is_even
from autopar.passes.kernels.row_wise import row_wise
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_value import ParameterPlan
from autopar.program import Program
from autopar.rules.engine import tensor_operands


def placed_weights(program: Program, module: str) -> tuple[str, ...]:
    """The parameters that hold the experts of a module in dim 0. Raises PlanMismatchError where there are none such."""
    inputs = zip(program.placeholders, program.inputs, strict=True)
    names = {node: meaning.name for node, meaning in inputs if meaning.role == "parameter"}
    products = [n for n in expert_products(program.graph) if module_of(n) == module]
    found = dict[str, None]()
    for product in products:
        if base_name(product.target) != "expert_linear":
            continue
        weight = tensor_operands(product)[1]
        source = _source(weight, int(weight.meta["val"].shape[0]), module)
        if source not in names:
            raise PlanMismatchError(
                f"the experts of {module or 'the model'} are no dim of one parameter, but made by {source.target}: an "
                "order could not say which rank holds which"
            )
        _refuse_others(source, int(weight.meta["val"].shape[0]), {*products}, names[source])
        found[names[source]] = None
    if not found:
        there = ", ".join(expert_counts(program.graph)) or "no module of it"
        raise PlanMismatchError(f"expert_order.{module}: the model has no experts there, but in {there}")
    return tuple(found)


def _source(node: fx.Node, experts: int, module: str) -> fx.Node:
    """The first value of which every row is made of the row of an expert alone."""
    while node.op == "call_function":
        how = row_wise(node, experts)
        if how is None or len(how.operands) != 1 or not how.returns_rows:
            return node
        (node,) = how.operands
    return node


def _refuse_others(source: fx.Node, experts: int, products: set[fx.Node], name: str) -> None:
    """Raises PlanMismatchError where a parameter has readers that would see its experts in another order."""
    seen, waiting = set[fx.Node](), [source]
    while waiting:
        value = waiting.pop()
        for user in value.users:
            if user in seen or user.op == "output":
                continue
            seen.add(user)
            if user in products and value in tensor_operands(user)[1:2]:
                continue
            how = row_wise(user, experts)
            if how is None or value not in how.operands or not how.returns_rows:
                raise PlanMismatchError(
                    f"{name} is read by {user.meta.get('operator', user)}, too, which would see its experts in another "
                    "order than the model's"
                )
            waiting.append(user)


def order_of_parameters(plan: Plan, program: Program) -> Mapping[str, tuple[int, ...]]:
    """Parameter -> the expert at every index of its dim 0, of those that lie in an order. Raises PlanMismatchError for
    experts that cannot be placed, naming module, parameter and reason."""
    counts, found = expert_counts(program.graph), dict[str, tuple[int, ...]]()
    for module, order in plan.expert_order.items():
        if module in counts and len(order) != counts[module]:
            raise PlanMismatchError(
                f"expert_order.{module} has {len(order)} experts, the model {counts[module]}: write each once"
            )
        for name in placed_weights(program, module):
            if name in plan.parameters:
                _check_layouts(module, name, plan.parameters[name], len(order), plan.layout_mesh)
                found[name] = order
    return found


def _check_layouts(module: str, name: str, entry: ParameterPlan, experts: int, mesh: Mesh) -> None:
    where = f"expert_order.{module}: {name}"
    for what, layout in (("stored", entry.stored), ("used", entry.used), ("reduced from", entry.gradient)):
        lies = f"{what} as {format_layout(layout)} on mesh {mesh.shape}"
        if any(isinstance(p, Shard) and p.dim == 0 and p.split > 1 for p in layout):
            raise PlanMismatchError(f"{where} is {lies}, which deals experts out apart: neighbours can be placed")
        if not is_even((experts,), layout, 0, mesh):
            raise PlanMismatchError(f"{where}: {experts} experts do not divide over the ranks (it is {lies})")
    if not any(isinstance(p, Shard) and p.dim == 0 for p in entry.stored):
        stored = format_layout(entry.stored)
        raise PlanMismatchError(f"{where} is stored as {stored}: every rank has every expert, which has no order")


def as_held(plan: Plan, program: Program) -> Plan:
    """The plan as ranks hold its parameters: layouts of placed experts say their order; the plan itself where no
    experts are placed."""
    if not plan.expert_order:
        return plan
    orders = order_of_parameters(plan, program)
    held = {
        name: replace(entry, stored=in_order(entry.stored, 0, orders[name])) if name in orders else entry
        for name, entry in plan.parameters.items()
    }
    return replace(plan, parameters=held)
