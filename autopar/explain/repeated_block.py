"""Repeated block: one layer of those that repeat, as parts with their layouts, kernels and collectives.

    model.layers.*  (32 of them, model.layers.16 shown)
    input_layernorm    S(0)       forward 90 us
    mlp.down_proj      P(sum)     forward 0.8 ms    reduce_scatter over tp 0.36 ms
       weight          tp: S(1)   all_gather over dp_shard 0.52 ms

A part is what a module of the block computes in forward, or one operator of the block itself; parts know whose values
they read. Seconds are the price list's, of one micro-batch: every kernel and collective of the block is in one part, or
in what is left over.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.cost_models.program_costs import COMPUTE, ProgramAction
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import format_placements, without_numbers
from autopar.simulation.bodies import Body
from autopar.simulation.priced_stages import PricedStage
from autopar.simulation.step_program import StepProgram

INPUT = "input of the block"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCollective:
    """A collective of a part. moves_weight: it gathers a weight or reduces a gradient of one; layout: what it makes."""

    kind: str
    axes: str
    seconds: float
    phase: str
    moves_weight: bool
    layout: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPart:
    """What one module of a block makes. reads: places of the parts whose values it takes; weights: (name, stored
    layout); seconds: of its kernels."""

    name: str
    operators: tuple[str, ...] = ()
    layout: str
    reads: tuple[int, ...] = ()
    weights: tuple[tuple[str, str], ...] = ()
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    collectives: tuple[BlockCollective, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedBlock:
    """A block and its parts in the order of forward; the first one is what comes in. left_seconds: of the kernels and
    collectives of the block that belong to no part."""

    pattern: str
    count: int
    name: str
    parts: tuple[BlockPart, ...]
    left_seconds: float

    @property
    def seconds(self) -> float:
        """Of all kernels and collectives of the block, forward and backward, one after the other."""
        kernels = (part.forward_seconds + part.backward_seconds for part in self.parts)
        collectives = (one.seconds for part in self.parts for one in part.collectives)
        return math.fsum([*kernels, *collectives, self.left_seconds])


def repeated_block(step: StepProgram) -> RepeatedBlock | None:
    """The block that most operators of forward belong to, the middle one of those that repeat; None where none does."""
    instances = _instances(step.plan)
    if not instances:
        return None
    pattern = max(instances, key=lambda one: (sum(instances[one].values()), one))
    names = list(instances[pattern])
    name = names[len(names) // 2]
    stage = max(step.graphs.of, key=lambda one: sum(_is_inside(_owner(n), name) for n in _forward(one)))
    return _Reader(step, stage, name).block(pattern, len(names))


def _instances(plan: Plan) -> dict[str, dict[str, int]]:
    """Pattern -> block -> operators of forward, of blocks that occur more than once."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for operator in plan.operators:
        path = operator.partition("/")[0].split(".")
        number = next((place for place, part in enumerate(path) if part.isdigit()), None)
        if number is not None and not operator.endswith("/bwd"):
            block = ".".join(path[: number + 1])
            found[without_numbers(block)][block] += 1
    return {pattern: dict(blocks) for pattern, blocks in found.items() if len(blocks) > 1}


def _forward(stage: PricedStage) -> Iterator[fx.Node]:
    return iter(stage.lowered.partition.forward.graph.nodes)


def _owner(node: fx.Node) -> str:
    return str(node.meta.get("operator", ""))


def _is_inside(name: str, block: str) -> bool:
    return name.startswith((f"{block}.", f"{block}/"))


@dataclass(slots=True)
class _Part:
    """A part in the making. behind: places of all parts that it depends on."""

    name: str
    layout: str
    operators: list[str] = field(default_factory=list)
    reads: set[int] = field(default_factory=set)
    behind: set[int] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=lambda: {"forward": 0.0, "backward": 0.0})
    collectives: list[BlockCollective] = field(default_factory=list)


class _Reader:
    """Reads one block off the lowered graphs of its stage."""

    def __init__(self, step: StepProgram, stage: PricedStage, name: str) -> None:
        self.plan, self.stage, self.name = step.plan, stage, name
        self.bodies = list(step.bodies(stage, step.graphs.passes.kinds(stage.number)))
        self.parts = [_Part(INPUT, "")]
        self.of_module: dict[str, int] = {}
        self.of_operator: dict[str, int] = {}
        self.weight_only: set[str] = set()

    def block(self, pattern: str, count: int) -> RepeatedBlock:
        self._read_forward()
        left = [seconds for body in self.bodies for seconds in self._read_prices(body)]
        return RepeatedBlock(
            pattern=pattern, count=count, name=self.name, left_seconds=math.fsum(left),
            parts=tuple(self._part(place) for place in range(len(self.parts))),
        )  # fmt: skip

    def _read_forward(self) -> None:
        """Parts and whose values they read, along the graph."""
        parameters, prepared = set(self.plan.parameters), self.stage.lowered.prepared
        if prepared is not None:  # what is gathered once per step comes in like a parameter
            parameters |= {_owner(node) for node in prepared.prepare.graph.nodes}
        origins: dict[fx.Node, frozenset[int]] = {}
        only_weights, flows = set[fx.Node](), set[fx.Node]()
        for node in _forward(self.stage):
            inputs, owner = node.all_input_nodes, _owner(node)
            if (node.op == "placeholder" and owner in parameters) or (
                inputs and all(one in only_weights for one in inputs)
            ):
                only_weights.add(node)
                self.weight_only.add(owner)
                origins[node] = frozenset()
                continue
            came = frozenset[int]().union(*(origins[one] for one in inputs))
            if not _is_inside(owner, self.name):
                is_sent = node.op == "placeholder"  # by the stage before
                is_learned = is_sent or any(one in flows or one in only_weights for one in inputs)
                if is_learned and owner in self.plan.operators:  # else positions, masks, random numbers
                    flows.add(node)
                    origins[node] = frozenset({0})
                else:
                    origins[node] = came
                continue
            if owner not in self.plan.operators:
                origins[node] = came
                continue
            if 0 in came and not self.parts[0].layout:
                self.parts[0].layout = self._layout_of(next(one for one in inputs if 0 in origins[one]))
            origins[node] = frozenset({self._place(owner, came)})

    def _layout_of(self, node: fx.Node) -> str:
        entry = self.plan.operators.get(_owner(node))
        copy = node.meta.get("redistributes")
        layout = copy.layout if copy is not None else entry.outputs[0] if entry is not None and entry.outputs else None
        return "" if layout is None else format_placements(layout, self.plan.layout_mesh)

    def _place(self, owner: str, came: frozenset[int]) -> int:
        """The part of an operator: that of its module, unless it reads what already depends on that part."""
        module = owner.partition("/")[0]
        relative = module.removeprefix(self.name).removeprefix(".") or owner.rpartition("/")[2]
        place = self.of_module.get(relative)
        if place is None or any(place in self.parts[one].behind for one in came if one != place):
            name = relative if place is None else f"{relative} (behind)"
            place = self.of_module[relative] = len(self.parts)
            self.parts.append(_Part(name, ""))
        part = self.parts[place]
        part.reads |= came - {place}
        part.behind |= (came - {place}).union(*(self.parts[one].behind for one in came if one != place))
        if owner not in part.operators:
            part.operators.append(owner)
        outputs = self.plan.operators[owner].outputs
        part.layout = format_placements(outputs[0], self.plan.layout_mesh) if outputs else part.layout
        self.of_operator[owner] = place
        return place

    def _read_prices(self, body: Body) -> Iterator[float]:
        """Give every action of the block to its part; yields the seconds of those that have none."""
        nodes = list(body.graph.nodes)
        phase = "forward" if body.turn in ("F", "prepare") else "backward"
        for action in body.actions:
            if not _is_inside(action.name, self.name):
                continue
            place = self._place_of(action.name)
            if place is None:
                yield action.seconds
            elif action.stream == COMPUTE:
                self.parts[place].seconds[phase] += action.seconds
            else:
                self.parts[place].collectives.append(self._collective(action, phase, nodes))

    def _place_of(self, name: str) -> int | None:
        own = name.removesuffix("/bwd")
        if own in self.of_operator:
            return self.of_operator[own]
        module = own.partition("/")[0] if "/" in own else own.rpartition(".")[0]
        return self.of_module.get(module.removeprefix(self.name).removeprefix("."))

    def _collective(self, action: ProgramAction, phase: str, nodes: Sequence[fx.Node]) -> BlockCollective:
        moves = action.moves_parameter or action.name in self.weight_only or action.name in self.plan.parameters
        copy = nodes[action.position].meta.get("redistributes")
        layout = "" if copy is None else format_placements(copy.layout, self.plan.layout_mesh)
        return BlockCollective(kind=action.kind, axes=action.stream, seconds=action.seconds, phase=phase,
                               moves_weight=moves, layout=layout)  # fmt: skip

    def _part(self, place: int) -> BlockPart:
        part, mesh = self.parts[place], self.plan.layout_mesh
        module = f"{self.name}.{part.name}."
        weights = [
            (name.removeprefix(module), format_placements(entry.stored, mesh))
            for name, entry in self.plan.parameters.items()
            if name.startswith(module) and "." not in name.removeprefix(module)
        ]
        return BlockPart(
            name=part.name, operators=tuple(one.rpartition("/")[2] for one in part.operators), layout=part.layout,
            reads=tuple(sorted(part.reads)), weights=tuple(weights), forward_seconds=part.seconds["forward"],
            backward_seconds=part.seconds["backward"], collectives=tuple(part.collectives),
        )  # fmt: skip
