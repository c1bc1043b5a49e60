"""Lowering: Program + Plan + rank -> the program that this rank runs, with local shapes and explicit collectives.

    h = mm(x, w)                      w split by columns, v by rows, over "tp"
    y = mm(h, v)                -->   h = mm(x, w_local)
                                      y = wait_tensor(all_reduce(mm(h, v_local), "sum", "tp"))

The graph is written directly: local shapes follow from the layouts, nothing is traced again. It is walked once; every
operator takes its operands from `LocalValues`, which redistributes them and folds views, and defines its outputs there.
A gradient is reduced as soon as it exists, so that the unreduced ones of a whole model are never alive together.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar._compat import Graph, LazyGraphModule
from autopar.errors import PlanMismatchError
from autopar.graphs.node_values import is_getitem
from autopar.layouts.placement import Layout, format_layout, is_legal, replicated
from autopar.passes.emitter import Emitter
from autopar.passes.lowering.check_plan import OperatorPlans, output_shapes
from autopar.passes.lowering.local_call import LocalContext, emit_local_call
from autopar.passes.lowering.local_values import LocalValue, LocalValues
from autopar.passes.random_operators import SEED, is_random
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_value import HOST, OperatorPlan, ParameterPlan
from autopar.program import Input, Output, Program
from autopar.rules.engine import is_view, tensor_operands


def lower(program: Program, plan: Plan, rank: int) -> Program:
    """The program of `rank`: inputs have the local shapes of their stored layouts, outputs keep their order and roles.

    Calls that nobody reads are still there (`remove_unused`). An input with role "seed" (0-dim int64) is added when a
    random operator exists. Raises PlanMismatchError for entries that are missing or that the graph, the mesh or the
    rules do not allow.
    """
    return _Lowering(program, plan, rank).run()


@dataclass(frozen=True, slots=True)
class _Produced:
    """An operator with several outputs: its local node and its entry of the plan."""

    node: fx.Node
    phase: str
    plan: OperatorPlan


class _Lowering:
    """One walk over the captured graph."""

    def __init__(self, program: Program, plan: Plan, rank: int) -> None:
        self._program = program
        self._plan = plan
        self._operators = OperatorPlans(plan)
        self._graph = Graph()
        self._emit = Emitter(self._graph, plan.mesh, rank)
        self._values = LocalValues(self._emit)
        self._several: dict[fx.Node, _Produced] = {}
        self._seed: fx.Node | None = None
        self._inputs = dict(zip(program.placeholders, program.inputs, strict=True))
        self._parameters: dict[str, ParameterPlan] = {}

    def run(self) -> Program:
        inputs = [self._placeholder(node, meaning) for node, meaning in self._inputs.items()]
        if self._plan.rounds or any(is_random(node) for node in self._program.graph.nodes):
            inputs.append(self._seed_placeholder())
        gradients: dict[fx.Node, Any] = {}
        meanings = {node: meaning for node, meaning in self._returned_pairs() if meaning.role == "gradient"}
        for node in self._program.graph.nodes:
            if node.op == "call_function" and not is_view(node):
                self._operator(node)
            if node in meanings:
                gradients[node] = self._returned(node, meanings[node])
        pairs = self._returned_pairs()
        self._graph.output(tuple(gradients[n] if meanings.get(n) is m else self._returned(n, m) for n, m in pairs))
        module: fx.GraphModule = LazyGraphModule(self._program.graph_module, self._graph)
        return replace(self._program, graph_module=module, inputs=tuple(inputs))

    # inputs

    def _placeholder(self, node: fx.Node, meaning: Input) -> Input:
        layout = self._input_layout(meaning)
        self._check_layout(meaning.name, meaning.shape, layout)
        local = self._graph.placeholder(node.name)
        shape = self._emit.local_shape(meaning.shape, layout)
        phase = "backward" if meaning.role == "tangent" else "forward"
        self._emit.at(phase, meaning.name)
        self._emit.describe(local, shape, meaning.dtype)
        shared, kept = self._parameter_copies(meaning)
        self._values.define(
            node,
            LocalValue(
                node=local,
                shape=meaning.shape,
                layout=layout,
                phase=phase,
                operator=meaning.name,
                shared=shared,
                kept=kept,
            ),
        )
        entry = self._parameters.get(meaning.name)
        return replace(meaning, shape=shape, on_host=entry is not None and entry.stored_on == HOST)

    def _input_layout(self, meaning: Input) -> Layout:
        plan, name = self._plan, meaning.name
        if meaning.role == "parameter":
            self._parameters[name] = parameter = _parameter_entry(plan, name)
            return parameter.stored
        if meaning.role == "buffer":
            return plan.buffers.get(name, self._everywhere)
        if meaning.role == "tangent":
            return self._output_layout(name)
        return plan.inputs.get(name, self._everywhere)

    def _parameter_copies(self, meaning: Input) -> tuple[dict[str, tuple[Layout, ...]], bool]:
        """Per phase, the layouts that a parameter passes on the way to its consumers; whether backward keeps them."""
        if meaning.role != "parameter":
            return {}, False
        entry = self._parameters[meaning.name]
        self._check_layout(meaning.name, meaning.shape, entry.gradient)
        shared = {"forward": entry.shared_forward, "backward": entry.shared_backward}
        used = (entry.used,) if entry.used != entry.stored else ()
        return {phase: used + ((copy,) if copy else ()) for phase, copy in shared.items()}, entry.keep_gathered

    def _seed_placeholder(self) -> Input:
        self._seed = self._graph.placeholder(SEED)
        self._emit.at("forward", SEED)
        self._emit.describe(self._seed, (), torch.int64)
        return Input(role="seed", name=SEED, shape=(), dtype=torch.int64)

    # operators

    def _operator(self, node: fx.Node) -> None:
        if is_getitem(node):
            self._output_of_several(node)
            return
        entry, phase = self._operators.of(node), node.meta["phase"]
        wanted = iter(entry.inputs)
        local = [self._values.get(operand, next(wanted), phase) for operand in tensor_operands(node)]
        args, kwargs = _with_operands(node, local)
        context = LocalContext(
            node=node,
            plan=entry,
            mesh=self._plan.mesh,
            coordinate=self._emit.coordinate,
            graph=self._graph,
            seed=self._seed,
        )
        last = next(iter(reversed(self._graph.nodes)), None)
        produced = emit_local_call(context, args, kwargs)
        self._emit.at(phase, node.meta["operator"])
        self._name_helpers(last)
        if produced not in local:
            self._describe(produced, node, entry)
        if isinstance(node.meta["val"], torch.Tensor):
            self._define(node, produced, node, entry, phase, 0)
        else:
            self._several[node] = _Produced(produced, phase, entry)

    def _name_helpers(self, last: fx.Node | None) -> None:
        """Phase and operator of the nodes behind `last` that an implementation wrote without."""
        for helper in itertools.takewhile(lambda node: node is not last, reversed(self._graph.nodes)):
            if "phase" not in helper.meta:
                helper.meta.update(phase=self._emit.phase, operator=self._emit.operator)

    def _describe(self, produced: fx.Node, node: fx.Node, entry: OperatorPlan) -> None:
        """Write the meta of what an operator makes; of several outputs an implementation may say other dtypes."""
        value = node.meta["val"]
        shapes = [
            None if shape is None else self._emit.local_shape(shape, layout)
            for shape, layout in zip(output_shapes(node), entry.outputs, strict=True)
        ]
        if isinstance(value, torch.Tensor):
            self._emit.describe(produced, shapes[0], value.dtype)
        else:
            captured = tuple(getattr(v, "dtype", None) for v in value)
            self._emit.describe(produced, tuple(shapes), produced.meta.get("dtype", captured))

    def _output_of_several(self, node: fx.Node) -> None:
        source, index = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        produced = self._several[source]
        self._emit.at(produced.phase, source.meta["operator"])
        shapes, dtypes = produced.node.meta["local_shape"], produced.node.meta["dtype"]
        local = self._emit.call(operator.getitem, (produced.node, index), shapes[index], dtypes[index])
        self._define(node, local, source, produced.plan, produced.phase, index)

    def _define(
        self, node: fx.Node, local: fx.Node, source: fx.Node, entry: OperatorPlan, phase: str, index: int
    ) -> None:
        shape = output_shapes(source)[index]
        assert shape is not None
        shared = {"forward": _at(entry.shared_forward, index), "backward": _at(entry.shared_backward, index)}
        if local.meta["operator"] == source.meta["operator"] and "layout" not in local.meta:
            local.meta |= {"layout": entry.outputs[index], "global_shape": shape, "output": index}
        self._values.define(
            node,
            LocalValue(
                node=local,
                shape=shape,
                layout=entry.outputs[index],
                phase=phase,
                operator=source.meta["operator"],
                shared=shared,
            ),
        )

    # outputs

    def _returned_pairs(self) -> list[tuple[Any, Output]]:
        return list(zip(self._program.returned, self._program.outputs, strict=True))

    def _returned(self, node: Any, meaning: Output) -> Any:
        if not isinstance(node, fx.Node):
            return node
        shape = tuple(node.meta["val"].shape)
        if meaning.role == "gradient":
            entry = self._parameters.get(meaning.name)
            layout = entry.stored if entry else self._plan.inputs.get(meaning.name, self._everywhere)
            via = (entry.gradient,) if entry and entry.gradient != entry.stored else ()
            return self._values.get(node, layout, "backward", via)
        layout = self._mutated_layout(meaning.name) if meaning.role == "mutation" else self._output_layout(meaning.name)
        self._check_layout(meaning.name, shape, layout)
        return self._values.get(node, layout, "forward")

    def _output_layout(self, name: str) -> Layout:
        return self._plan.outputs.get(name, self._everywhere)

    def _mutated_layout(self, name: str) -> Layout:
        if name in self._parameters:
            return self._parameters[name].stored
        return self._plan.buffers.get(name, self._plan.inputs.get(name, self._everywhere))

    # checks

    @property
    def _everywhere(self) -> Layout:
        return replicated(len(self._plan.mesh.shape))

    def _check_layout(self, name: str, shape: tuple[int, ...], layout: Layout) -> None:
        if len(layout) != len(self._plan.mesh.shape) or not is_legal(shape, layout, self._plan.mesh):
            raise PlanMismatchError(
                f"{name}: a tensor of shape {list(shape)} cannot lie as {format_layout(layout)} on mesh "
                f"{self._plan.mesh.shape}; edit the plan or plan again"
            )


def _parameter_entry(plan: Plan, name: str) -> ParameterPlan:
    if name not in plan.parameters:
        raise PlanMismatchError(
            f"the plan has no entry for the parameter {name}; it was made for another model: plan again"
        )
    return plan.parameters[name]


def _at(layouts: tuple[Layout | None, ...], index: int) -> tuple[Layout, ...]:
    layout = layouts[index] if index < len(layouts) else None
    return () if layout is None else (layout,)


def remove_unused(graph: fx.Graph) -> None:
    """Drop calls that nobody reads; every rank drops the same ones, collectives included."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


def _with_operands(node: fx.Node, local: list[fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a node with its tensor operands replaced, in the order of `tensor_operands`."""
    remaining = iter(local)
    args, kwargs = map_arg((node.args, node.kwargs), lambda _: next(remaining))
    return tuple(args), dict(kwargs)
