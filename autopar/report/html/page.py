"""A plan as one self-contained HTML page, for people who will not open a terminal.

    write_report(Plan.load("plan.json"), "plan.html", timeline=read_timeline("step.json"))

Template, style and script lie in `templates/`; the page loads nothing, so that it opens from disk and can be mailed.
What repeats in it (layouts, explanations) is written once and numbered: the page of 126 layers stays below 3 MB. The
plan alone is enough; a timeline (`autopar simulate --trace`) adds the step, live bytes and communication by axis, and
the model behind the plan (`autopar report --simulate`) memory by kind and the repeated block.
"""

from __future__ import annotations

import functools
import html
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import jinja2
import msgspec
from typing_extensions import Unpack

from autopar.files import write_atomically
from autopar.plans import plan_summary
from autopar.plans.mesh_links import mesh_axes
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_reasons import question_in_words, reasons
from autopar.plans.plan_text import format_bytes, format_mesh, format_seconds
from autopar.report.html import palette
from autopar.report.html.bars import memory_parts, plan_bars
from autopar.report.html.block_picture import block_picture
from autopar.report.html.headline import certificate, headline, why_not
from autopar.report.html.layout_colours import LayoutColours
from autopar.report.html.memory_picture import kind_rows, memory_pictures
from autopar.report.html.mesh_picture import mesh_pictures
from autopar.report.html.stage_grid import stage_grid
from autopar.report.html.step_shares import step_shares
from autopar.report.html.timeline import RecordedStep, communication, drawn_memory, drawn_tracks
from autopar.report.html.tree import module_tree

if TYPE_CHECKING:
    from autopar.explain.memory_over_time import MemoryOverTime
    from autopar.explain.repeated_block import RepeatedBlock

TEMPLATES = Path(__file__).parent / "templates"
NOTEBOOK_HEIGHT = "36em"


class Played(TypedDict, total=False):
    """What is known of a step beyond its plan. timeline: simulated or measured; memory: by kind, of one rank of every
    rank group; block: the repeated one."""

    timeline: RecordedStep | None
    memory: Sequence[MemoryOverTime]
    block: RepeatedBlock | None


def write_report(plan: Plan, path: str | os.PathLike[str], **played: Unpack[Played]) -> None:
    """Write the page of `plan`, atomically."""
    write_atomically(path, report_page(plan, **played).encode())


def report_page(plan: Plan, **played: Unpack[Played]) -> str:
    """The page as text."""
    timeline, block = played.get("timeline"), played.get("block")
    memory = memory_pictures(played.get("memory") or ())
    colours = LayoutColours(plan.layout_mesh)
    row_name = "group" if plan.in_stages else "rank"
    data: dict[str, Any] = {
        "row": row_name,
        "tree": module_tree(plan, colours),
        "timeline": None if timeline is None else drawn_tracks(timeline),
    }
    shares = step_shares(timeline) if timeline is not None and plan.in_stages else None
    return _environment().get_template("report.html.j2").render(
        _first_screen(plan, timeline),
        row_name=row_name,
        bubbles={} if shares is None else {rank: f"{part:.1%}" for rank, part in shares.bubbles.items()},
        axes=mesh_axes(plan),
        meaning=plan_summary.legend(plan).splitlines(),
        meshes=mesh_pictures(plan),
        block=None if block is None else block_picture(block, colours),
        grid=None if timeline is None else stage_grid(timeline),
        memory=memory_parts(plan),
        memory_pictures=memory,
        kind_rows=kind_rows(memory),
        curves=() if timeline is None or memory else drawn_memory(timeline),
        communication=() if timeline is None else communication(timeline),
        data=_for_script(data),
    )


def notebook_cell(plan: Plan) -> str:
    """The first screen of the page as an element of a notebook, in a frame of its own style."""
    page = _environment().get_template("notebook.html.j2").render(_first_screen(plan, None))
    return (
        f'<iframe srcdoc="{html.escape(page)}" title="{html.escape(_title(plan))}" '
        f'style="width: 100%; height: {NOTEBOOK_HEIGHT}; border: 0"></iframe>'
    )


def _first_screen(plan: Plan, timeline: RecordedStep | None) -> dict[str, Any]:
    """What `first_screen.html.j2` reads."""
    return {
        "title": _title(plan),
        "plan": plan,
        "asked": question_in_words(plan),
        "chosen": plan_summary.headline(plan),
        "said": (plan_summary.beside_known_plans(plan), *reasons(plan)),
        "headline": headline(plan, timeline),
        "certificate": certificate(plan),
        "palette": palette,
        "bars": plan_bars(plan),
        "refused": why_not(plan),
    }


def _title(plan: Plan) -> str:
    """The model without folder and ending: "llama-3-8b", "train:make_model"."""
    return str(plan.question.get("model") or "plan").removeprefix("hf:").rpartition("/")[2].removesuffix(".json")


def _for_script(data: Any) -> str:
    """JSON that may stand in a script element: no text in it closes the element."""
    return msgspec.json.encode(data).decode().replace("<", "\\u003c")


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=jinja2.select_autoescape(enabled_extensions=("j2",)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"seconds": format_seconds, "bytes": format_bytes, "mesh": format_mesh}
    return environment
