"""The model of a report: modules as a tree, with the layouts of parameters and operators in numbers.

    {"texts": ["R", "tp: S(0)"], "root": {"children": [["layers", {"children": [["0", ...]]}]], "rows": [...]}}

A row is [name, kind, text of its layout, text of what it is used as, colour, number of its explanation]. Texts and
explanations that occur in several rows are written once. The page makes elements of a module when it is opened.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import axes_at_work, format_placements, runners_up
from autopar.plans.plan_value import OperatorPlan, ParameterPlan
from autopar.report.html.layout_colours import REPLICATED, LayoutColours

OUTSIDE = "(outside of modules)"


class _Numbered:
    """Texts, each written once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def of(self, text: str) -> int:
        if text not in self._numbers:
            self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return self._numbers[text]


def module_tree(plan: Plan, colours: LayoutColours) -> dict[str, Any]:
    """The tree of all parameters and operators of a plan, see the module docstring."""
    mesh, texts, notes, root = plan.layout_mesh, _Numbered(), _Numbered(), _module()
    for name, parameter in plan.parameters.items():
        note = notes.of(_parameter_note(plan, name, parameter))
        stored, used = (texts.of(format_placements(layout, mesh)) for layout in (parameter.stored, parameter.used))
        *path, last = name.split(".")
        _inside(root, path)["rows"].append([last, "parameter", stored, used, colours.of(parameter.stored), note])
    for name, operator in plan.operators.items():
        module, _, last = name.partition("/")
        layout = operator.outputs[0] if operator.outputs else None
        whole = texts.of("R" if layout is None else format_placements(layout, mesh))
        note = notes.of(_operator_note(plan, name, operator))
        colour = REPLICATED if layout is None else colours.of(layout)
        path = module.split(".") if module else [OUTSIDE]
        _inside(root, path)["rows"].append([last, "operator", whole, whole, colour, note])
    return {"texts": texts.texts, "notes": notes.texts, "legend": colours.legend, "root": _listed(root)}


def _module() -> dict[str, Any]:
    return {"children": {}, "rows": []}


def _inside(root: dict[str, Any], path: Iterable[str]) -> dict[str, Any]:
    found = root
    for part in path:
        found = found["children"].setdefault(part, _module())
    return found


def _listed(module: dict[str, Any]) -> dict[str, Any]:
    children = [[name, _listed(child)] for name, child in module["children"].items()]
    return {"children": children, "rows": module["rows"]}


def _parameter_note(plan: Plan, name: str, parameter: ParameterPlan) -> str:
    mesh = plan.layout_mesh
    lines = [f"gradient {format_placements(parameter.gradient, mesh)}"]
    if parameter.stored != parameter.used:
        lines.append("the gathered weight is " + ("kept" if parameter.keep_gathered else "gathered again in backward"))
    return "\n".join([*lines, *runners_up(plan, name)])


def _operator_note(plan: Plan, name: str, operator: OperatorPlan) -> str:
    mesh = plan.layout_mesh
    lines = [axes_at_work(operator, mesh)]
    lines += [f"operand {i} {format_placements(layout, mesh)}" for i, layout in enumerate(operator.inputs)]
    if operator.recompute:
        lines.append("computed again in backward")
    return "\n".join([*lines, *runners_up(plan, name)])
