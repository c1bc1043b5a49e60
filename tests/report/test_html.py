"""The HTML report: what stands in it, that it loads nothing, and that it opens, searches, zooms and answers clicks."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import autopar
from autopar.cli.report_command import report
from autopar.cost_models.chrome_trace import Span
from autopar.cost_models.simulator import Action, simulate
from autopar.explain.asked_step import asked_step
from autopar.explain.memory_over_time import memory_over_time
from autopar.explain.origin import Remembered
from autopar.explain.repeated_block import repeated_block
from autopar.layouts.placement import Mesh, Shard
from autopar.plans.parallel_plan import Plan
from autopar.plans.plan_text import format_seconds
from autopar.report.html.block_picture import block_picture
from autopar.report.html.headline import headline
from autopar.report.html.layout_colours import LayoutColours
from autopar.report.html.memory_picture import memory_pictures
from autopar.report.html.mesh_picture import group_ranks, mesh_pictures
from autopar.report.html.page import Played, report_page, write_report
from autopar.report.html.step_shares import step_shares
from autopar.report.html.timeline import (
    CURVE_WIDTH,
    MOST_SPANS,
    RecordedStep,
    communication,
    drawn_memory,
    drawn_tracks,
    read_timeline,
)
from autopar.report.html.tree import module_tree
from autopar.simulation.played_plan import simulate_step
from tests.report.chromium import clicked, in_script, needs_chromium

FEATURES = 64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.pow(2).mean()


@pytest.fixture(scope="module")
def plan() -> Plan:
    return autopar.plan(Model(), torch.randn(16, FEATURES), cluster="2x4 H100-SXM", mesh=(2, 4), with_baselines=False)


@pytest.fixture(scope="module")
def step() -> RecordedStep:
    actions = [
        Action("layers.0/mm#0", "compute", 2.0, allocates=4e9),
        Action("layers.0/mm#0: all_reduce", "inner", 3.0, (0,), communication=True),
        Action("layers.1/mm#0", "compute", 2.0, frees=4e9),
        Action("layers.1/mm#0", "compute", 1.0, rank=1),
    ]
    return RecordedStep.of(simulate(actions))


def test_the_page_holds_the_figures_and_loads_nothing(plan: Plan, step: RecordedStep) -> None:
    page = report_page(plan, timeline=step)
    assert format_seconds(plan.predicted.step_seconds) in page
    assert all(baseline.name in page for baseline in plan.baselines)
    assert "groups over 2 nodes, 4 groups share a node" in page.replace("&#39;", "'")
    assert "all_reduce" in page
    assert not re.search(
        r"""(src|href)\s*=(?!"#)|@import|url\((?!#)|fetch\(|http""", page.replace("http://www.w3.org/2000/svg", "")
    )


def test_the_page_says_what_layouts_mean(plan: Plan) -> None:
    page = report_page(plan)
    assert "R: whole on every device" in page
    name, chosen = next(iter(plan.operators.items()))
    turned = (Shard(0, split=2, zigzag=True), *chosen.inputs[0][1:])
    operators = {**plan.operators, name: replace(chosen, inputs=(turned, *chosen.inputs[1:]))}
    assert "zigzag order" not in page
    assert "the sequence is in zigzag order: rank 0 has the first and the last block" in report_page(
        replace(plan, operators=operators)
    )


def test_utilisation_is_the_models_flops_over_the_step(plan: Plan) -> None:
    flops = 3 * 2 * 2 * 16 * FEATURES**2 - 2 * 16 * FEATURES**2  # two products, thrice; no gradient of the input
    rate = flops / plan.predicted.step_seconds / plan.num_ranks
    found = {figure.name: figure for figure in headline(plan, None)}["utilisation (MFU)"]
    assert plan.statistics["flops_of_pass"] == pytest.approx(flops)
    assert plan.statistics["dtype_of_flops"] == "float32"
    assert found.meaning.startswith(f"{rate / 1e12:.3g} of ")


def test_names_cannot_leave_their_place_in_the_page(plan: Plan) -> None:
    evil = "</script><script>alert(1)</script>"
    page = report_page(plan.with_(parameters={evil: next(iter(plan.parameters.values()))}, question={"model": evil}))
    assert evil not in page
    assert "\\u003c/script>" in page


def test_the_tree_holds_every_name_once(plan: Plan) -> None:
    tree, names = module_tree(plan, LayoutColours(plan.layout_mesh)), list[str]()

    def visit(module: dict[str, Any], path: str) -> None:
        for name, kind, *_ in module["rows"]:
            names.append(f"{path}{'/' if kind == 'operator' else '.'}{name}")
        for name, child in module["children"]:
            visit(child, f"{path}.{name}")

    visit(tree["root"], "")
    known = [*plan.parameters, *plan.operators]
    assert sorted(name.removeprefix(".").replace("(outside of modules)/", "/") for name in names) == sorted(known)


def test_a_long_step_is_thinned_without_losing_time() -> None:
    many = 10 * MOST_SPANS
    spans = tuple(
        Span(rank=0, stream="compute", name=f"k{i}", start_seconds=i * 1e-5, end_seconds=(i + 1) * 1e-5)
        for i in range(many)
    )
    drawn = drawn_tracks(RecordedStep(spans=spans, memory={}))["tracks"][0]
    assert len(drawn["spans"]) <= MOST_SPANS
    assert sum(length for _, _, length in drawn["spans"]) == pytest.approx(many * 10.0, rel=1e-6)
    assert drawn["busy"] == pytest.approx(1.0)


def test_a_trace_is_read_as_it_was_written(tmp_path: Path, step: RecordedStep) -> None:
    timeline = simulate([Action("0F0", "compute", 0.5, allocates=8.0, frees=8.0), Action("x: send", "p2p", 0.25, (0,))])
    timeline.write_chrome_trace(tmp_path / "step.json")
    read = read_timeline(tmp_path / "step.json")
    assert read.seconds == pytest.approx(0.75)
    assert [(s.rank, s.stream, s.name) for s in read.spans] == [(0, "compute", "0F0"), (0, "p2p", "x: send")]
    assert [(row.kind, row.count, row.seconds) for row in communication(read)] == [("send", 1, pytest.approx(0.25))]
    assert drawn_memory(read)[0].peak_bytes == 8.0


@pytest.mark.parametrize("content", ["{}", "[{}]", "no json", '{"traceEvents": [{"ph": "X"}]}'])
def test_what_is_no_trace_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(autopar.ConfigurationError, match="is no Chrome trace"):
        read_timeline(tmp_path / "t.json")
    with pytest.raises(autopar.ConfigurationError, match="No such file"):
        read_timeline(tmp_path / "missing.json")


def test_the_command_writes_beside_the_plan(tmp_path: Path, plan: Plan) -> None:
    plan.save(tmp_path / "plan.json")
    done = CliRunner().invoke(report, [str(tmp_path / "plan.json"), "--json"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "plan.html").stat().st_size > 10_000


@pytest.fixture(scope="module")
def played(plan: Plan) -> Played:
    assert isinstance(plan.origin, Remembered)
    asked = asked_step(plan.origin.source, plan).step
    timeline = simulate_step(asked).timeline
    memory = memory_over_time(asked, timeline)
    return {"timeline": RecordedStep.of(timeline), "memory": memory, "block": repeated_block(asked)}


def test_memory_and_block_of_the_captured_step_are_drawn(plan: Plan, played: Played) -> None:
    """The stacked areas reach the peak at the fullest moment, the arrows end where boxes begin."""
    (memory,), block, timeline = played["memory"], played["block"], played["timeline"]
    assert timeline is not None
    assert memory.peak_bytes == pytest.approx(plan.predicted.peak_bytes)
    assert memory.moments[0][0] <= memory.peak[0] < memory.seconds == timeline.seconds
    (picture,) = memory_pictures([memory])
    assert math.fsum(layer.bytes_at_peak for layer in picture.layers) == pytest.approx(memory.peak_bytes)
    assert min(float(y) for y in re.findall(r"V([\d.]+)", picture.layers[-1].path)) == 0.0  # the top of the box
    assert block is not None
    assert (block.pattern, block.count, block.parts[1].reads) == ("layers.*", 2, (0,))
    drawn = block_picture(block, LayoutColours(plan.layout_mesh))
    tops = {box.y for box in drawn.boxes}
    assert len(drawn.rows) == len(block.parts) > 2
    assert all(int(arrow.rpartition(",")[2]) + 2 in tops for arrow in drawn.arrows if "C" in arrow)
    page = report_page(plan, **played)
    assert all(f"<td>{kind}</td>" in page.replace("&#39;", "'") for kind in memory.kinds)


def test_the_mesh_is_drawn_onto_its_nodes(plan: Plan) -> None:
    """2 x 4 on two nodes of 4: the first axis joins the nodes, the second stays inside each."""
    outer, inner = mesh_pictures(plan)
    members = [[device.style == "member" for device in node.devices] for node in outer.nodes]
    assert members == [[True, False, False, False]] * 2
    assert [(node.lit_frame, node.lit_line) for node in outer.nodes] == [(False, True)] * 2
    assert [all(device.style == "member" for device in node.devices) for node in inner.nodes] == [True, False]
    assert [(node.lit_frame, node.lit_line) for node in inner.nodes] == [(True, False), (False, False)]
    assert group_ranks((2, 3, 4), 1) == [0, 4, 8]
    large = plan.with_(cluster="2048x8 H100-SXM", mesh=Mesh(("dp_replicate", "dp_shard"), (8, 2048)))
    far = mesh_pictures(large)[0]
    assert [node.number for node in far.nodes][-1] == 768
    assert (len(far.nodes), far.more_nodes) == (8, 2040)


@needs_chromium
@pytest.mark.slow
def test_a_browser_opens_searches_zooms_and_clicks(tmp_path: Path, plan: Plan, step: RecordedStep) -> None:
    write_report(plan, tmp_path / "plan.html", timeline=step)
    seen = clicked(
        tmp_path / "plan.html",
        """
        const one = (selector) => document.querySelector(selector);
        seen.modules = [...document.querySelectorAll("#tree > details > details > summary")].length;
        one("#tree > details > details > summary").click();
        await rest();
        seen.layers = document.querySelectorAll("#tree > details > details > details").length;
        const search = one("#search");
        search.value = "layers.1"; search.dispatchEvent(new Event("input"));
        seen.matches = document.querySelectorAll("#matches .row").length;
        seen.treeHidden = one("#tree").hidden;
        one("#matches .row button").click();
        seen.expanded = one("#matches .row button").getAttribute("aria-expanded");
        seen.note = one("#matches .note").textContent;
        search.value = ""; search.dispatchEvent(new Event("input"));
        seen.treeBack = !one("#tree").hidden;
        seen.tracks = document.querySelectorAll(".track").length;
        seen.window = one("#window").textContent;
        const width = () => Number(one(".track rect").getAttribute("width"));
        seen.before = width(); one("#zoom-in").click(); seen.after = width();
        one("#zoom-all").click(); seen.again = width();
        one(".track rect").dispatchEvent(new MouseEvent("click"));
        seen.span = one("#span-text").textContent;
        one("#span-after").click();
        seen.next = one("#span-text").textContent;
        const key = (name) => one("#tracks").dispatchEvent(new KeyboardEvent("keydown", {key: name, cancelable: true}));
        key("+"); seen.byKey = width(); key("0"); seen.whole = width();
        const operable = "a, button, input, summary, [tabindex]";
        seen.unnamed = [...document.querySelectorAll("[role=img], [role=region], nav, [role=group]")].filter(
          (each) => !each.getAttribute("aria-label") && !each.getAttribute("aria-labelledby")).length;
        seen.unreachable = [...document.querySelectorAll(".scroll")].filter((each) => !each.matches(operable)).length;
        seen.bars = document.querySelectorAll(".bar").length;
        """,
    )
    assert seen["errors"] == []
    assert seen["modules"] == 2  # layers, and what is outside of modules
    assert seen["layers"] == 2
    inside = [name for name in (*plan.parameters, *plan.operators) if "layers.1" in name]
    assert seen["matches"] == len(inside) > 0
    assert (seen["treeHidden"], seen["treeBack"]) == (True, True)
    assert "gradient" in seen["note"]
    assert seen["tracks"] == 3
    assert seen["window"].endswith("5.000 s")
    assert (seen["before"], seen["after"], seen["again"]) == (400, 300, 400)  # 0 .. 2 of 5 s, then of 1.25 .. 3.75 s
    assert seen["span"].startswith("layers.0/mm#0: 2.000 s")
    assert seen["next"].startswith("layers.1/mm#0: 2.000 s")
    assert (seen["byKey"], seen["whole"]) == (300, 400)
    assert (seen["expanded"], seen["unnamed"], seen["unreachable"]) == ("true", 0, 0)
    assert seen["bars"] == 1 + sum(baseline.predicted is not None for baseline in plan.baselines)


@needs_chromium
@pytest.mark.slow
def test_nothing_is_wider_than_a_phone(tmp_path: Path, plan: Plan, played: Played) -> None:
    """What is wider scrolls in a box of its own; the page in a frame of 390 pixels."""
    table = "<table><tr><td style='min-width: 500px'>x</td></tr></table>"
    page = report_page(plan, **played).replace("</main>", f"<div class='scroll'>{table}</div></main>")
    wide = page.replace("</main>", f"{table}</main>")
    write_report(plan, tmp_path / "plan.html")
    seen = clicked(
        tmp_path / "plan.html",
        f"""
        const widths = async (text) => {{
          const frame = document.createElement("iframe");
          frame.style.cssText = "width: 390px; height: 844px; border: 0";
          frame.srcdoc = text;
          document.body.append(frame);
          await new Promise((done) => {{ frame.onload = done; }});
          const inner = frame.contentDocument.documentElement;
          return [inner.scrollWidth, inner.clientWidth];
        }};
        seen.page = await widths({in_script(page)});
        seen.wide = await widths({in_script(wide)});
        """,
    )
    assert seen["errors"] == []
    assert seen["page"][0] == seen["page"][1] <= 390
    assert seen["wide"][0] > seen["wide"][1]


def test_a_simulated_step_has_its_seconds_among_the_figures(plan: Plan, step: RecordedStep) -> None:
    found = {figure.name: figure.value for figure in headline(plan, step)}
    assert found["simulated"] == format_seconds(step.seconds)
    assert "simulated" not in {figure.name for figure in headline(plan, None)}


def test_a_curve_has_at_most_two_points_a_pixel() -> None:
    count = 10 * CURVE_WIDTH
    span = Span(rank=0, stream="compute", name="mm", start_seconds=0.0, end_seconds=1.0)
    memory = [(number / count, float(number % 7)) for number in range(count)]
    (curve,) = drawn_memory(RecordedStep(spans=(span,), memory={0: memory}))
    assert CURVE_WIDTH < curve.path.count("H") <= 2 * CURVE_WIDTH + 1


def test_time_that_several_spans_share_is_covered_once() -> None:
    spans = tuple(
        Span(rank=0, stream=stream, name="mm", start_seconds=start, end_seconds=end)
        for stream, start, end in (("compute", 0.0, 1.0), ("compute", 2.0, 3.0), ("inner", 2.5, 4.0))
    )
    shares = step_shares(RecordedStep(spans=spans, memory={}))
    assert shares.bubbles == {0: 0.25}
    assert (shares.computing, shares.exposed, shares.exposed_seconds) == (0.5, 0.25, 1.0)
