"""Read the skeleton of a program: its slots and links, in schedule order (which the dual ascent likes)."""

from __future__ import annotations

from torch import fx

from autopar.graphs.operator_names import operator_kind
from autopar.planner.problem.equivalence import Equivalences
from autopar.planner.problem.factorisation import Factorisation, Value
from autopar.planner.problem.graph_operators import base_of, is_operator, operators
from autopar.planner.problem.skeleton import Skeleton, Slot, SlotKind, SlotLink
from autopar.program import Program, batch_size
from autopar.rules.engine import tensor_operands


def skeleton_of(program: Program, kernel_backend: str, factorisation: Factorisation) -> Skeleton:
    """The skeleton of a program whose kernels `kernel_backend` emits ("eager", "inductor"), read once and kept with its
    factorisation."""
    found = factorisation.derived.get(("skeleton", kernel_backend))
    if not isinstance(found, Skeleton):
        found = _Reader(program, Equivalences(program, kernel_backend, factorisation)).read()
        factorisation.derived["skeleton", kernel_backend] = found
    return found


class _Reader:
    """Fills the lists of one skeleton."""

    def __init__(self, program: Program, equivalences: Equivalences) -> None:
        self.program, self.equivalences = program, equivalences
        self.slots: list[Slot] = []
        self.links: list[SlotLink] = []
        self.copies_of: dict[int, tuple[SlotLink, list[SlotLink]]] = {}
        self.operators: dict[fx.Node, int] = {}
        self.placeholders: dict[fx.Node, int] = {}
        self.outputs: dict[int, int] = {}
        self.copies: dict[tuple[Value, str], int] = {}
        self.found: dict[tuple[Value, str], tuple[int, int]] = {}  # where readers of a phase find it: (slot, output)
        self.bases: dict[fx.Node, tuple[Value, int, int]] = {}
        self.num_readers: dict[tuple[Value, str], int] = {}

    def _key_heads(self) -> int:
        """The most heads of keys that an attention has."""
        rules = self.equivalences.rules.items()
        return max((r.sizes.get("h", 1) for n, r in rules if operator_kind(n.target) == "attention"), default=1)

    def read(self) -> Skeleton:
        self._count_readers()
        self._add_placeholders()
        self._add_tangents()
        for node in self.program.graph.nodes:
            if node.op == "get_attr":
                self._add_constant(node)
            elif node.op == "call_function" and is_operator(node):
                self._add_operator(node)
        self._tie_outputs()
        equivalences = self.equivalences
        return Skeleton(
            program=self.program,
            slots=self.slots,
            links=self.links,
            copies_of=self.copies_of,
            equivalences=equivalences.members,
            tensors=equivalences.tensors,
            views=equivalences.views,
            batch=equivalences.batch,
            sequence=equivalences.sequence,
            sequences=(batch_size(self.program) or 1) * self._key_heads(),
            operators=self.operators,
            placeholders=self.placeholders,
            outputs=self.outputs,
            copies=self.copies,
            rules=equivalences.rules,
            uncovered=[node for node in self.operators if node not in equivalences.rules],
            heavy=equivalences.heavy,
        )

    def _base(self, operand: fx.Node) -> tuple[Value, int, int]:
        """(tensor behind the views, number of its equivalence class, number of the chain of views)."""
        if operand not in self.bases:
            value, views = base_of(operand)
            self.bases[operand] = value, self.equivalences.tensor(value), self.equivalences.chain(views)
        return self.bases[operand]

    def _count_readers(self) -> None:
        for node in operators(self.program):
            for operand in tensor_operands(node):
                key = self._base(operand)[0], str(node.meta["phase"])
                self.num_readers[key] = self.num_readers.get(key, 0) + 1

    # -- slots

    def _add(self, kind: SlotKind, name: str, node: fx.Node, equivalence: int, phase: str = "forward") -> int:
        self.slots.append(Slot(kind, name, node, equivalence, phase))
        return len(self.slots) - 1

    def _offer(self, node: fx.Node, slot: int, num_outputs: int = 1) -> None:
        for output in range(num_outputs):
            self.found[(node, output), "forward"] = self.found[(node, output), "backward"] = (slot, output)

    def _add_leaf(self, kind: SlotKind, name: str, node: fx.Node) -> None:
        self.placeholders[node] = self._add(kind, name, node, self.equivalences.leaf(kind, node))
        self._offer(node, self.placeholders[node])

    def _add_constant(self, node: fx.Node) -> None:
        self.placeholders[node] = self._add("data", node.name, node, self.equivalences.constant(node))
        self._offer(node, self.placeholders[node])

    def _add_placeholders(self) -> None:
        for node, entry in zip(self.program.placeholders, self.program.inputs, strict=True):
            if entry.role == "parameter":
                self._add_leaf("parameter", entry.name, node)
            elif entry.role == "input":
                self._add_leaf("data", entry.name, node)
            elif entry.role != "tangent":
                self._add_constant(node)

    def _add_tangents(self) -> None:
        """The tangent of the loss is replicated; the tangent of an output has that output's layout (one slot)."""
        by_name = self._placeholders_named("tangent")
        for position, output in enumerate(self.program.outputs):
            node = by_name.get(output.name) if output.role in ("loss", "output") else None
            if node is None:
                continue
            if output.role == "loss":
                self._add_constant(node)
            else:
                self._add_leaf("data", output.name, node)
                self.outputs[position] = self.placeholders[node]

    def _add_operator(self, node: fx.Node) -> None:
        operands, phase = tensor_operands(node), str(node.meta["phase"])
        sources = [self._source(operand, phase) for operand in operands]
        slot = self._add("operator", node.meta["operator"], node, self.equivalences.operator(node, operands))
        self.operators[node] = slot
        for port, (operand, source) in enumerate(zip(operands, sources, strict=True)):
            self._connect(operand, source, slot, port)
        value = node.meta["val"]
        self._offer(node, slot, len(value) if isinstance(value, tuple | list) else 1)

    # -- links

    def _source(self, operand: fx.Node, phase: str) -> tuple[int, int]:
        """Where an operand is found: with its producer, or with the shared copy of the phase, made when first read."""
        value, tensor, _ = self._base(operand)
        key = (value, phase)
        if self.num_readers.get(key, 0) > 1 and key not in self.copies:
            source, output = self.found[key]
            slot = self._add("copy", value[0].name, value[0], -1, phase)
            self.links.append(SlotLink(source, output, slot, 0, tensor, 0))
            self.copies_of[slot] = (self.links[-1], [])
            self.copies[key] = slot
            self.found[key] = (slot, 0)
        return self.found[key]

    def _connect(self, operand: fx.Node, source: tuple[int, int], target: int, port: int) -> None:
        _, tensor, views = self._base(operand)
        link = SlotLink(*source, target, port, tensor, views)
        self.links.append(link)
        if link.source in self.copies_of and self.slots[target].kind == "operator":
            self.copies_of[link.source][1].append(link)

    def _tie_outputs(self) -> None:
        """Gradients meet the layout in which their parameter is stored, or their input lies; mutations and the loss are
        replicated."""
        differentiated = self._placeholders_named("input") | self._placeholders_named("parameter")
        for position, (node, output) in enumerate(zip(self.program.returned, self.program.outputs, strict=True)):
            if not isinstance(node, fx.Node):
                continue
            value, tensor, _ = self._base(node)
            source = self.found[value, "backward" if output.role == "gradient" else "forward"]
            if output.role == "gradient":
                self._connect(node, source, self.placeholders[differentiated[output.name]], 0)
            elif position in self.outputs:
                self._connect(node, source, self.outputs[position], 0)
            elif output.role == "output":
                self.outputs[position] = self._add("data", output.name, node, self.equivalences.output(node))
                self._connect(node, source, self.outputs[position], 0)
            else:
                self.slots[source[0]].tolls.append((source[1], tensor))

    def _placeholders_named(self, role: str) -> dict[str, fx.Node]:
        pairs = zip(self.program.placeholders, self.program.inputs, strict=True)
        return {entry.name: node for node, entry in pairs if entry.role == role}
