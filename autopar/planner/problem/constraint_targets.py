"""Targets: the tensors that the patterns of `constraints=` mean in one program.

A pattern is a shell glob (`*` is any text, dots included). The first kind of name that it matches is the one meant:

    "layers.*.up.weight"   parameters: how they are stored, and how operators find them
    "layers.*.mlp"         modules: the tensors that leave them in the forward pass
    "layers.0.mlp/mm#0"    operators, with a pattern that ends in /bwd those of backward: their first output

Dims of a module's output are those of the captured tensor, where a dim in which the batch is flattened with others
counts as two, as the model's own tensors have it: of (8 * 1024, 768), S(1) is the sequence and S(2) or S(-1) the last.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.errors import ConfigurationError
from autopar.layouts.placement import Layout, Mesh, Placement, Shard
from autopar.layouts.views import cut_positions
from autopar.passes.tidy.place_casts import is_cast
from autopar.passes.view_layouts import layout_after_view
from autopar.planner.problem.factorisation import Factorisation, Value, batch_class, shape_of, value_of
from autopar.planner.problem.graph_operators import base_of, operators
from autopar.plans.plan_value import DEFAULT_IMPLEMENTATION, RING
from autopar.program import Program
from autopar.request.constraints import EVERY_AXIS, Constraints, PlacementRules, Recompute
from autopar.rules.alternatives import alternatives_for, alternatives_of
from autopar.rules.call import call_of
from autopar.rules.engine import tensor_operands

NEAREST_NAMES = 3


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A tensor that a pattern names. value: the decision behind it; views: what the tensor looks at it through, last
    view first; folded: (dim, batch) where this dim of the tensor holds the batch and more."""

    name: str
    value: Value
    views: tuple[fx.Node, ...]
    shape: tuple[int, ...]
    folded: tuple[int, int] | None = None

    @property
    def user_shape(self) -> tuple[int, ...]:
        """The shape in whose dims a placement counts."""
        if self.folded is None:
            return self.shape
        dim, batch = self.folded
        return (*self.shape[:dim], batch, self.shape[dim] // batch, *self.shape[dim + 1 :])

    def lies(self, layout: Layout, axis: int, placement: Placement, mesh: Mesh) -> bool:
        """Whether the value under `layout` gives this tensor `placement` (in dims of `user_shape`) on an axis."""
        seen = self.layout_seen(layout, mesh)
        if seen is None:
            return False
        found = seen[axis]
        if not isinstance(placement, Shard) or self.folded is None:
            return found == placement
        dim, batch = self.folded
        if placement.dim not in (dim, dim + 1):
            return found == replace(placement, dim=placement.dim - (placement.dim > dim))
        if not isinstance(found, Shard) or found.dim != dim:
            return False
        in_batch = cut_positions(seen, dim, mesh.shape)[axis] < batch
        return in_batch == (placement.dim == dim)

    def layout_seen(self, layout: Layout, mesh: Mesh) -> Layout | None:
        """The layout of this tensor when the value behind it has `layout`; None if no layout says it."""
        seen: Layout | None = layout
        for view in reversed(self.views):
            seen = None if seen is None else layout_after_view(view, seen, mesh)
        return seen


@dataclass(frozen=True, slots=True, eq=False)
class BoundConstraint:
    """One line of `constraints=`: a pattern, an axis name or EVERY_AXIS, a placement, and the tensors that it means."""

    pattern: str
    axis: str
    placement: Placement
    kind: str
    targets: tuple[Target, ...]

    def __str__(self) -> str:
        axis = "every axis" if self.axis == EVERY_AXIS else self.axis
        return f"{self.pattern!r}: {self.placement} on {axis}"

    def axes(self, mesh: Mesh) -> list[int]:
        """The axes of a mesh that it speaks of."""
        return [axis for axis, name in enumerate(mesh.axis_names) if self.axis in (EVERY_AXIS, name)]


def bind_constraints(
    program: Program, constraints: Constraints, factorisation: Factorisation
) -> tuple[BoundConstraint, ...]:
    """What the user's placements mean. Raises ConfigurationError for a pattern that matches nothing, with the nearest
    names, and for a dim that a tensor does not have."""
    if not constraints.placements:
        return ()
    names = _Names(program, factorisation)
    bound = []
    for pattern, by_axis in constraints.placements.items():
        kind, targets = names.match(pattern)
        for axis, placement in by_axis.items():
            bound += _bound(pattern, axis, placement, kind, targets)
    return tuple(bound)


def named_axes(rules: PlacementRules) -> dict[str, str]:
    """Every axis that the constraints name, and a pattern that does."""
    return {axis: pattern for pattern, by_axis in rules.items() for axis in by_axis if axis != EVERY_AXIS}


def meshes_with_axes(rules: PlacementRules, meshes: Sequence[Mesh]) -> list[Mesh]:
    """The meshes that have every axis which the constraints name. Raises ConfigurationError where none has."""
    named = named_axes(rules)
    found = [mesh for mesh in meshes if named.keys() <= set(mesh.axis_names)]
    if not found:
        known = list(dict.fromkeys(name for mesh in meshes for name in mesh.axis_names))
        axis, pattern = next(((a, p) for a, p in named.items() if a not in known), next(iter(named.items())))
        raise ConfigurationError(
            f"constraint {pattern!r} names axis {axis!r}; the mesh has {', '.join(known)}; dims= names axes, for "
            f"example dims={{{axis!r}: 2}}"
        )
    return found


def freed_axes(bound: Sequence[BoundConstraint], mesh: Mesh) -> dict[fx.Node, tuple[int, ...]]:
    """Parameter or operator -> the axes on which the user's constraints take the place of what the axis' name asks.

    Weights that such an operator reads are freed too: one that is replicated over tp needs whole weights there.
    """
    found: dict[fx.Node, set[int]] = {}
    for one in bound:
        axes = one.axes(mesh)
        for target in one.targets:
            node = target.value[0]
            for freed in (node, *_weights(node)):
                found.setdefault(freed, set()).update(axes)
    return {node: tuple(sorted(axes)) for node, axes in found.items()}


def _weights(node: fx.Node) -> list[fx.Node]:
    """The placeholders that an operator reads through views and a cast, and the casts."""
    if node.op != "call_function":
        return []
    found = []
    for operand in tensor_operands(node):
        source = base_of(operand)[0][0]
        origin = base_of(source.all_input_nodes[0])[0][0] if is_cast(source) else source
        if origin.op == "placeholder":
            found += [origin] if origin is source else [origin, source]
    return found


def recompute_of(program: Program, constraints: Constraints) -> dict[fx.Node, Recompute]:
    """Forward operator -> what the user's patterns (of modules or operators) say of its recomputation; a later pattern
    counts before an earlier one. Raises ConfigurationError for a pattern that matches no forward operator."""
    found: dict[fx.Node, Recompute] = {}
    for pattern, choice in constraints.recompute.items():
        forward = [node for node in operators(program) if node.meta["phase"] != "backward"]
        found |= dict.fromkeys(_matched(pattern, forward, f"recompute={choice!r}", "forward operator"), choice)
    return found


def implementations_of(program: Program, constraints: Constraints) -> dict[fx.Node, str]:
    """Operator -> the operator alternative that `cp=` or `without_rings` asks of it or the user's patterns (of modules
    or operators, forward and backward) name for it, of those that have it; a later pattern counts before an earlier
    one. Raises ConfigurationError for a pattern that matches no operator with the alternative."""
    found: dict[fx.Node, str] = {}
    if constraints.cp is not None or constraints.without_rings:
        name = RING if constraints.cp == "ring" else DEFAULT_IMPLEMENTATION
        rings = (node for node in operators(program) if any(way.name == RING for way in alternatives_of(node)))
        found |= dict.fromkeys(rings, name)
    for pattern, name in constraints.implementations.items():
        having = [
            node for node in operators(program) if name in (alternative.name for alternative in alternatives_of(node))
        ]
        if not having and name != DEFAULT_IMPLEMENTATION:
            raise ConfigurationError(
                f"constraint {pattern!r} with implementation={name!r}: {_why_none_has(program, name)}"
            )
        candidates = operators(program) if name == DEFAULT_IMPLEMENTATION else having
        found |= dict.fromkeys(_matched(pattern, candidates, f"implementation={name!r}", "operator that has it"), name)
    return found


def _why_none_has(program: Program, name: str) -> str:
    """Why no operator of a program has an alternative: the calls that come nearest."""
    near = [node for node in operators(program) if name in (way.name for way in alternatives_for(node.target))]
    if not near:
        return "the program has no operator for which it stands"
    return f'it does not stand for {call_of(near[0]).text}, as the program has it; write precision="bf16" or "fp8"'


def _matched(pattern: str, candidates: Sequence[fx.Node], said: str, kind: str) -> list[fx.Node]:
    """The operators that a pattern of modules or operators means. Raises ConfigurationError where there are none."""
    matched = [node for node in candidates if _is_in(str(node.meta["operator"]), pattern)]
    if not matched:
        names = [str(node.meta["operator"]) for node in candidates]
        near = difflib.get_close_matches(pattern, names, NEAREST_NAMES, 0.3)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise ConfigurationError(f"constraint {pattern!r} with {said} matches no module or {kind}{hint}")
    return matched


def _is_in(operator: str, pattern: str) -> bool:
    """Whether a pattern means an operator, its module, or one around that."""
    path = operator.removesuffix("/bwd").rpartition("/")[0]
    around = [path.rsplit(".", up)[0] for up in range(path.count(".") + 1)]
    return any(fnmatch.fnmatchcase(name, pattern) for name in (operator, *around))


def notes_of(bound: Sequence[BoundConstraint]) -> list[str]:
    """One line per constraint: how many tensors it holds for, and one of them with the shape in which dims count."""
    return [
        f"constraint {one}: {len(one.targets)} {one.kind}, as {one.targets[0].name} {one.targets[0].user_shape}"
        for one in bound
    ]


def _bound(
    pattern: str, axis: str, placement: Placement, kind: str, targets: Sequence[Target]
) -> list[BoundConstraint]:
    """The constraint, or one per number of dims where the placement counts from the end."""
    if not isinstance(placement, Shard):
        return [BoundConstraint(pattern, axis, placement, kind, tuple(targets))]
    by_dim: dict[int, list[Target]] = {}
    for target in targets:
        rank = len(target.user_shape)
        if not -rank <= placement.dim < rank:
            raise ConfigurationError(
                f"constraint {pattern!r}: {target.name} cannot be stored or made {placement}: its shape is "
                f"{target.user_shape}; write a dim that it has, or a narrower pattern"
            )
        by_dim.setdefault(placement.dim % rank, []).append(target)
    return [
        BoundConstraint(pattern, axis, replace(placement, dim=dim), kind, tuple(found)) for dim, found in by_dim.items()
    ]


class _Names:
    """Parameters, modules and operators of a program, by name."""

    def __init__(self, program: Program, factorisation: Factorisation) -> None:
        self.program, self.factorisation = program, factorisation
        self.batch = batch_class(program, factorisation)
        self.parameters = {
            alias: node
            for node, entry in zip(program.placeholders, program.inputs, strict=True)
            if entry.role == "parameter"
            for alias in (entry.name, *entry.aliases)
        }
        self.operators = {str(node.meta["operator"]): node for node in operators(program)}
        paths = dict.fromkeys(name.rpartition("/")[0] for name in self.operators if not name.endswith("/bwd"))
        self.modules = {
            path.rsplit(".", up)[0]: None for path in paths if path for up in range(path.count(".") + 1)
        }  # a module and those around it

    def match(self, pattern: str) -> tuple[str, list[Target]]:
        """(kind of name, tensors) of a pattern."""
        parameters = dict.fromkeys(self.parameters[name] for name in fnmatch.filter(self.parameters, pattern))
        if parameters:
            return "parameters", [Target(node.meta["operator"], (node, 0), (), shape_of(node)) for node in parameters]
        modules = fnmatch.filter(self.modules, pattern)
        if modules:
            found = [target for path in modules for target in self._leaving(path)]
            if not found:
                raise ConfigurationError(f"constraint {pattern!r}: no tensor leaves {modules[0]} in the forward pass")
            return "outputs of modules", found
        matched = [self.operators[name] for name in fnmatch.filter(self.operators, pattern)]
        if matched:
            return "operators", [_first_output(node) for node in matched]
        known = [*self.parameters, *self.modules]
        near = difflib.get_close_matches(pattern, known, n=NEAREST_NAMES, cutoff=0.3) or known[:NEAREST_NAMES]
        raise ConfigurationError(
            f"constraint {pattern!r} matches no parameter, module or operator; nearest: {', '.join(near)}"
        )

    def _leaving(self, path: str) -> list[Target]:
        """The forward tensors that are made in a module and read, in forward, outside of it (or returned)."""
        found: dict[Value, Target] = {}
        for node in self.program.graph.nodes:
            if node.op != "call_function" or node.meta.get("phase") != "forward" or not _inside(node, path):
                continue
            if isinstance(node.meta.get("val"), tuple | list):
                continue  # its getitems are looked at themselves
            if any(_reads_outside(user, path) for user in node.users):
                value, views = base_of(node)
                shape = shape_of(*value_of(node))
                found.setdefault(value, Target(path, value, views, shape, self._folded(node, shape)))
        return list(found.values())

    def _folded(self, node: fx.Node, shape: tuple[int, ...]) -> tuple[int, int] | None:
        value = value_of(node)
        for dim in range(len(shape)):
            atoms = self.factorisation.atoms(value, dim)
            if len(atoms) > 1 and self.factorisation.atom_class(value, dim) == self.batch:
                return dim, atoms[0]
        return None


def _inside(node: fx.Node, path: str) -> bool:
    return str(node.meta.get("operator", "")).startswith((f"{path}/", f"{path}."))


def _reads_outside(user: fx.Node, path: str) -> bool:
    return user.op == "output" or (user.meta.get("phase") == "forward" and not _inside(user, path))


def _first_output(node: fx.Node) -> Target:
    value = node.meta["val"]
    values = value if isinstance(value, tuple | list) else (value,)
    output = next(i for i, item in enumerate(values) if item is not None)
    return Target(str(node.meta["operator"]), (node, output), (), shape_of(node, output))
