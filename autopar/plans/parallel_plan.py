"""Plan: everything that was chosen, as a readable, editable file. Planner and runtime meet only here.

    plan = autopar.Plan.load("plan.json")
    plan.parameters["head.weight"].stored       what was chosen is a value (`plan_value.py`)
    plan.explain("head.weight")                 what it is asked, `autopar.explain` answers
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from autopar.errors import ConfigurationError
from autopar.files import decoded_json, file_content, write_atomically
from autopar.later import later
from autopar.plans.plan_entries import check_plan
from autopar.plans.plan_json import UNWRITTEN, plain, read
from autopar.plans.plan_summary import one_screen, summary
from autopar.plans.plan_text import difference
from autopar.plans.plan_value import PlanValue
from autopar.plans.plan_versions import SCHEMA_VERSION, current

if TYPE_CHECKING:
    from autopar.explain.answers import Comparison, Explanations, MemoryTable, RankProgram


class PlanQuestions(Protocol):
    """What answers questions about plans, as the methods of `Plan` of the same names: `autopar.explain` has it."""

    def explain(
        self, plan: Plan, name: str | None, vs: Plan | str | None, exact: bool
    ) -> Explanations | Comparison:
        """Why a name of the plan lies as it does, or (vs) where two plans part."""

    def memory(self, plan: Plan, rank: int | None) -> MemoryTable:
        """The fullest moment of a step on one rank; None: the one that `Plan.memory` names."""

    def what_if(self, plan: Plan, changes: Mapping[str, object]) -> Plan:
        """The best plan for the same model under other wishes."""

    def edit(self, plan: Plan, changes: Mapping[str, object]) -> Plan:
        """The plan with these choices fixed and the others made again."""

    def code(self, plan: Plan, rank: int) -> RankProgram:
        """What one rank runs, as Python."""


PLAN_VARIABLE = "AUTOPAR_PLAN"
"""The plan file that `compile` takes where it is given none; `autopar run --plan` sets it."""

answers_of_file: Callable[[], PlanQuestions] = later("autopar.explain.alone", "FileAlone")
"""Who answers for a plan without an origin."""
notebook_cell: Callable[[Plan], str] = later("autopar.report.html.page", "notebook_cell")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(PlanValue):
    """What was chosen (`PlanValue`), its file, and whom to ask for more than it says."""

    origin: PlanQuestions | None = field(default=None, compare=False, repr=False, metadata={UNWRITTEN: True})
    """What made the plan, as long as it lives in the process that made it; a file has none (`Planner.bind`)."""

    def __repr__(self) -> str:
        return one_screen(self)

    def _repr_html_(self) -> str:
        """What a notebook shows: the first screen of the report."""
        return notebook_cell(self)

    def summary(self, verbose: bool = False) -> str:
        """The plan on one page: what it is and does, the known plans beside it, where its memory goes, the layouts of
        its parameters. verbose: what the search counted, too."""
        return summary(self, verbose)

    def explain(
        self, name: str | None = None, *, vs: Plan | str | None = None, exact: bool = False
    ) -> Explanations | Comparison:
        """Why a parameter, operator or module, or all that a glob matches, lies as it does: layout, cost by term, the
        runner-up with what switching costs, and which limits bind; or, with vs= another plan or the name of a known
        one ("ddp", "fsdp", "tp"), where the two part and what each difference costs. Both print themselves.

        exact: search for runners-up until they are proven, however long; else some seconds each, with what is proven
        till then. A plan from a file says layouts and nearest choices only. Raises ConfigurationError with the nearest
        names for a name that the plan does not have.
        """
        return self._asked.explain(self, name, vs, exact)

    def memory(self, rank: int | None = None) -> MemoryTable:
        """The fullest moment of a step on one rank: by kind, by module and over time, in bytes. None: rank 0, or with
        stages the first rank of the tightest rank group, and what every stage keeps for micro-batches in flight."""
        return self._asked.memory(self, rank)

    def what_if(self, **changes: object) -> Plan:
        """The best plan for the same model under other wishes: memory_limit=, dims=, mesh=, cluster=, constraints=,
        micro_batches=, ... as of `autopar.plan`; what is not named stays as it was asked."""
        return self._asked.what_if(self, changes)

    def edit(self, changes: Mapping[str, object]) -> Plan:
        """The plan with some placements changed by hand, completed, checked and priced again; everything else stays.

        changes: as `constraints=` of `autopar.plan`: {"lm_head.weight": "S(0)"}, {"head": {"tp": "R"}}; also, in
        micro-batches, {"gather_once": True}, and with stages {"layers.3": {"pp": 1}} (to stage 1),
        {"schedule": "gpipe"}, {"micro_batches": 8}. Raises ConfigurationError naming tensor, axis and reason for what
        cannot be meant, PlanMismatchError for choices that cannot stand side by side, and InfeasibleError where the
        edited plan does not fit into memory.
        """
        return self._asked.edit(self, changes)

    def code(self, rank: int = 0) -> RankProgram:
        """The program of one rank as readable Python: each line with its module, layout and predicted seconds."""
        return self._asked.code(self, rank)

    @property
    def _asked(self) -> PlanQuestions:
        return self.origin or answers_of_file()

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, by a temporary file and a rename."""
        write_atomically(Path(path), self.to_json())

    def to_json(self) -> bytes:
        """The plan as indented JSON."""
        document = {"schema_version": SCHEMA_VERSION, **plain(self)}
        return msgspec.json.format(msgspec.json.encode(document), indent=1)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan. Raises ConfigurationError for a file that is missing, damaged or of another schema."""
        return Plan.from_json(file_content(path, f"the plan {path}"), str(path))

    @staticmethod
    def from_json(content: bytes, origin: str = "plan") -> Plan:
        """Inverse of `to_json`. Raises ConfigurationError naming what is damaged."""
        document = decoded_json(content, origin)
        if not isinstance(document, dict):
            raise ConfigurationError(f"{origin} is damaged: a plan is a JSON object; plan again or restore the file")
        fields = current(document, origin)
        try:
            plan = read(fields, Plan)
            check_plan(plan)
        except (TypeError, ValueError, KeyError, ConfigurationError) as error:
            raise ConfigurationError(f"{origin} is damaged: {error}") from error
        return plan

    def diff(self, other: Plan) -> str:
        """Unified diff of the choices of two plans, empty when they are equal."""
        return difference(self, other)

    def with_(self, **changes: Any) -> Plan:
        """A copy with some fields replaced. Raises ConfigurationError for other kernels: operators were planned."""
        kernels = {*changes.get("kernels", self.kernels)} ^ {*self.kernels}
        if kernels:
            raise ConfigurationError(
                f"kernels: {', '.join(sorted(kernels))} would change the operators that this plan lays out; plan again "
                f"with kernels={tuple(changes['kernels'])!r}"
            )
        return replace(self, **changes)
