"""Plan: everything that was chosen, as a readable, editable file. Planner and runtime meet only here.

A plan names operators `module.path/op#k` (`/bwd` in backward), so it outlives torch's node names, and embeds the
question that it answers. Layouts are written as one string per mesh axis: `["S(0)", "R"]`.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from autopar.errors import ConfigurationError
from autopar.files import write_atomically
from autopar.layout import Layout, Mesh, Partial, Replicate, Shard, format_layout, parse_layout
from autopar.plan_text import explain, summary
from autopar.schedules.actions import Schedule, parse_schedule
from autopar.schedules.check import check_schedule
from autopar.schedules.list_scheduler import TIMED_FAMILIES, build_schedule

SCHEMA_VERSION = 1
PIPELINE_AXIS = "pp"
"""The first axis of the mesh of a plan with stages; layouts do not count it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPlan:
    """One parameter: stored layout (`.grad` and optimizer state share it), layout in which operators find it,
    layout to which its gradient is reduced first, and whether the gathered weight is kept for backward (ZeRO-2-like)
    or gathered again (ZeRO-3). `shared_*`: the copy that all consumers of a phase share, as in `OperatorPlan`."""

    stored: Layout
    used: Layout
    gradient: Layout
    keep_gathered: bool = False
    shared_forward: Layout | None = None
    shared_backward: Layout | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorPlan:
    """One operator: the name that each mesh axis splits (None: replicated, "partial": operands pass as Partial), the
    layouts of its tensor operands and outputs. `shared_forward` and `shared_backward` (one entry per output, None: no
    shared copy) are the layouts to which an output is redistributed once, for all its consumers of that phase.
    `recompute`: its outputs are computed again in backward instead of being saved."""

    axes: tuple[str | None, ...]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    shared_forward: tuple[Layout | None, ...] = ()
    shared_backward: tuple[Layout | None, ...] = ()
    recompute: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage: a run of forward operators in the order of the program, and their backward. `last_operator` ends it
    (None: the end of forward); the ranks at coordinate `rank_group` of the axis "pp" run it."""

    name: str
    last_operator: str | None
    rank_group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """Stages in the order of forward, and the schedule by which they take the plan's `micro_batches`: a family of
    `autopar.schedules` with `chunks` stages per rank group. `actions`: one line per rank group ("0F0,0F1,0B0") that
    takes the family's place; families whose order follows from the model's times need it."""

    schedule: str
    chunks: int
    stages: tuple[StagePlan, ...]
    actions: tuple[str, ...] = ()

    def built(self, micro_batches: int) -> Schedule:
        """What every rank group computes. Raises ConfigurationError for actions that cannot run, or stages that the
        schedule places on other rank groups."""
        num_groups = 1 + max(stage.rank_group for stage in self.stages)
        if self.schedule in TIMED_FAMILIES and not self.actions:
            raise ConfigurationError(f"the order of {self.schedule} follows from times: the plan must list its actions")
        schedule = (
            parse_schedule("\n".join(self.actions))
            if self.actions
            else build_schedule(self.schedule, num_groups, micro_batches, self.chunks)
        )
        check_schedule(schedule)
        given = tuple(stage.rank_group for stage in self.stages)
        if schedule.rank_of_stage != given or schedule.micro_batches != micro_batches:
            raise ConfigurationError(
                f"the schedule {self.schedule} runs {schedule.micro_batches} micro-batches with its stages on rank "
                f"groups {list(schedule.rank_of_stage)}; the plan has {micro_batches} and {list(given)}"
            )
        return schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the simulator says of one step on one rank: seconds and peak bytes, with their parts."""

    step_seconds: float
    peak_bytes: float
    compute_seconds: float = 0.0
    exposed_communication_seconds: float = 0.0
    bytes_by_kind: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A known plan (DDP, ZeRO-3, Megatron) or the best of another mesh, priced by the same model; `error` says why it
    is impossible. A mesh that was dropped unsolved has only `bound_seconds`: nothing on it is cheaper."""

    name: str
    dims: Mapping[str, int]
    objective_seconds: float | None = None
    bound_seconds: float | None = None
    predicted: Prediction | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """See the module docstring. `inputs` and `buffers` hold the layouts of data; `prices_hash` identifies the cost
    tables to which objective, bound and gap belong; `statistics` counts strategies, nodes and replicated FLOPs. With
    `micro_batches` m, operators, inputs and outputs are those of a m-th of the batch, and a step runs them m times.
    With a `pipeline`, the first axis of the mesh is "pp" and every layout is one on the other axes (`layout_mesh`)."""

    mesh: Mesh
    parameters: Mapping[str, ParameterPlan]
    operators: Mapping[str, OperatorPlan]
    inputs: Mapping[str, Layout]
    buffers: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    predicted: Prediction
    objective_seconds: float
    bound_seconds: float
    gap: float
    fingerprint: str
    cluster: str
    profile: str
    kernel_backend: str = "eager"
    micro_batches: int = 1
    pipeline: PipelinePlan | None = None
    prices_hash: str = ""
    question: Mapping[str, Any] = field(default_factory=dict)
    baselines: tuple[Baseline, ...] = ()
    alternatives: tuple[Baseline, ...] = ()
    uncovered: Mapping[str, float] = field(default_factory=dict)
    statistics: Mapping[str, float | int | str] = field(default_factory=dict)
    explanations: Mapping[str, tuple[tuple[str, float], ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def layout_mesh(self) -> Mesh:
        """The axes that layouts speak of: those of the mesh, without "pp" where there are stages."""
        if self.pipeline is None:
            return self.mesh
        return Mesh(self.mesh.axis_names[1:], self.mesh.shape[1:])

    @property
    def placements(self) -> dict[str, Layout]:
        """Parameter name -> stored layout."""
        return {name: parameter.stored for name, parameter in self.parameters.items()}

    def summary(self) -> str:
        """The plan on one page: itself beside the baselines, where its memory goes, the layouts of its parameters."""
        return summary(self)

    def explain(self, name: str) -> str:
        """Why the parameter, operator or module `name` lies as it does, its runner-up and the cost of switching.

        Raises ConfigurationError with the nearest names for a name that the plan does not have.
        """
        return explain(self, name)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, by a temporary file and a rename."""
        write_atomically(Path(path), self.to_json())

    def to_json(self) -> bytes:
        """The plan as indented JSON."""
        document = {"schema_version": SCHEMA_VERSION, **_plain(self)}
        return msgspec.json.format(msgspec.json.encode(document), indent=1)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan. Raises ConfigurationError for a file that is missing, damaged or of another schema."""
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise ConfigurationError(f"cannot read the plan {path}: {error.strerror}") from error
        return Plan.from_json(content, str(path))

    @staticmethod
    def from_json(content: bytes, origin: str = "plan") -> Plan:
        """Inverse of `to_json`. Raises ConfigurationError naming what is damaged."""
        try:
            document = msgspec.json.decode(content, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ConfigurationError(f"{origin} is damaged: {error}; plan again or restore the file") from error
        version = document.pop("schema_version", None)
        if version != SCHEMA_VERSION:
            raise ConfigurationError(f"{origin} has schema version {version}, this autopar reads {SCHEMA_VERSION}")
        try:
            plan: Plan = _read(document, Plan, "")
            _check_mesh(plan.mesh)
            if plan.pipeline is not None:
                check_pipeline(plan, plan.pipeline)
        except (TypeError, ValueError, KeyError, ConfigurationError) as error:
            raise ConfigurationError(f"{origin} is damaged: {error}") from error
        return plan

    def diff(self, other: Plan) -> str:
        """Unified diff of the choices of two plans, empty when they are equal."""
        return "\n".join(difflib.unified_diff(_choices(self), _choices(other), "this", "other", lineterm="", n=0))

    def with_(self, **changes: Any) -> Plan:
        """A copy with some fields replaced."""
        return replace(self, **changes)


def _plain(value: Any) -> Any:
    """Dataclasses -> dicts, layouts -> lists of strings, recursively."""
    if isinstance(value, Shard | Replicate | Partial):
        return str(value)
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _read(value: Any, kind: Any, where: str) -> Any:
    """Inverse of `_plain` for a field of type `kind`; errors name the path `where` of the damaged entry."""
    if kind == Layout:
        _expect(value, list, where)
        return parse_layout(value)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        choices = [choice for choice in arguments if choice is not type(None)]
        return _read(value, choices[0], where) if len(choices) == 1 else _scalar(value, tuple(choices), where)
    if origin is tuple:
        _expect(value, list, where)
        return tuple(_read_item(value, arguments, index, where) for index in range(len(value)))
    if origin is not None and issubclass(origin, Mapping):
        _expect(value, dict, where)
        return {key: _read(item, arguments[1], f"{where}.{key}") for key, item in value.items()}
    if is_dataclass(kind):
        return _read_dataclass(value, kind, where)
    return _scalar(value, (kind,), where)


def _read_item(value: list[Any], kinds: tuple[Any, ...], index: int, where: str) -> Any:
    kind = kinds[0] if len(kinds) == 2 and kinds[1] is Ellipsis else kinds[index]
    return _read(value[index], kind, f"{where}[{index}]")


def _read_dataclass(value: Any, kind: Any, where: str) -> Any:
    _expect(value, dict, where)
    hints = typing.get_type_hints(kind)
    unknown = set(value) - set(hints)
    if unknown:
        raise ValueError(f"{where or 'the plan'} has unknown fields {sorted(unknown)}")
    return kind(**{name: _read(item, hints[name], f"{where}.{name}".lstrip(".")) for name, item in value.items()})


def _scalar(value: Any, kinds: tuple[type, ...], where: str) -> Any:
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if int not in kinds else value
    if not isinstance(value, kinds):
        raise ValueError(f"{where} must be {' or '.join(k.__name__ for k in kinds)}, not {value!r}")
    return value


def _check_mesh(mesh: Mesh) -> None:
    if not len(mesh.shape) == len(mesh.axis_names) == len(set(mesh.axis_names)) or min(mesh.shape, default=0) < 1:
        raise ValueError(f"mesh axes {list(mesh.axis_names)} of sizes {list(mesh.shape)}: one size >= 1 per axis name")


def check_pipeline(plan: Plan, pipeline: PipelinePlan) -> None:
    """Raise ConfigurationError where stages, mesh and schedule of a plan do not fit together."""
    groups, stages = [stage.rank_group for stage in pipeline.stages], pipeline.stages
    if plan.mesh.axis_names[0] != PIPELINE_AXIS or len(plan.mesh.shape) < 2:
        raise ConfigurationError(
            f"a plan with stages has a mesh of {PIPELINE_AXIS!r} and at least one more axis (of size 1 where a stage "
            f"runs on one device), not {list(plan.mesh.axis_names)}"
        )
    if sorted(set(groups)) != list(range(plan.mesh.shape[0])) or plan.mesh.shape[0] < 2:
        raise ConfigurationError(
            f"stages stand on rank groups {groups}; the mesh has {plan.mesh.shape[0]}: at least 2, and all in use"
        )
    cuts = [stage.last_operator for stage in stages]
    unknown = [cut for cut in cuts[:-1] if cut is None or cut not in plan.operators or cut.endswith("/bwd")]
    if unknown or cuts[-1] is not None or len(set(cuts)) != len(cuts):
        raise ConfigurationError(
            f"stages end at {cuts}: each but the last at another forward operator of the plan, the last at null"
        )
    pipeline.built(plan.micro_batches)


def _expect(value: Any, kind: type, where: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{where or 'the plan'} must be a JSON {kind.__name__}, not {value!r}")


def _choices(plan: Plan) -> list[str]:
    """One line per choice, in plan order, for `diff`."""
    lines = [f"mesh {name}={size}" for name, size in zip(plan.mesh.axis_names, plan.mesh.shape, strict=True)]
    lines.append(f"micro_batches {plan.micro_batches}")
    if plan.pipeline is not None:
        lines.append(f"schedule {plan.pipeline.schedule}, {plan.pipeline.chunks} chunks {plan.pipeline.actions}")
        lines += [f"{stage.name} on {stage.rank_group} up to {stage.last_operator}" for stage in plan.pipeline.stages]
    for name, parameter in plan.parameters.items():
        kept = " kept" if parameter.keep_gathered else ""
        lines.append(f"{name}: stored {format_layout(parameter.stored)} used {format_layout(parameter.used)}{kept}")
    for name, operator in plan.operators.items():
        lines.append(f"{name}: {operator.axes} -> {[format_layout(layout) for layout in operator.outputs]}")
    return lines
