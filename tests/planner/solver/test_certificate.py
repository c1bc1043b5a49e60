import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from autopar.planner.solver import (
    Certificate,
    CertificateError,
    Problem,
    Solution,
    certified,
    check_certificate,
    evaluate,
    exact,
    solve,
)
from autopar.planner.solver.certificate import replay
from autopar.planner.solver.solution import Dominate, Fix, Status

Case = tuple[Problem, Solution]


@pytest.fixture
def by_messages(monkeypatch: pytest.MonkeyPatch, layers: Callable[..., Problem]) -> Case:
    monkeypatch.setattr(exact, "PEAK_ENTRIES", 0)
    problem = layers(2)
    solution = solve(problem)
    assert solution.certificate.kind == "messages"
    return problem, solution


@pytest.fixture
def with_fixing(monkeypatch: pytest.MonkeyPatch, random_problem: Callable[..., Problem]) -> Case:
    """A problem whose proof removes labels by their bounds."""
    monkeypatch.setattr(exact, "PEAK_ENTRIES", 0)
    monkeypatch.setattr(exact, "RECOMBINE_PEAK_ENTRIES", 0)
    for seed in range(200):
        problem = random_problem(seed, density=1.2)
        solution = solve(problem)
        if any(isinstance(step, Fix) for step in solution.certificate.steps):
            return problem, solution
    raise AssertionError("no random problem needed fixing")


def with_certificate(solution: Solution, **changes: object) -> Solution:
    return replace(solution, certificate=replace(solution.certificate, **changes))  # type: ignore[arg-type]


def test_good_solutions_pass(by_messages: Case, with_fixing: Case) -> None:
    check_certificate(*by_messages)
    check_certificate(*with_fixing)


def test_a_raised_lower_bound_is_rejected(by_messages: Case) -> None:
    problem, solution = by_messages
    raised = solution.lower_bound * (1 + 1e-6)
    with pytest.raises(CertificateError):
        check_certificate(problem, replace(solution, lower_bound=raised))
    with pytest.raises(CertificateError, match="proof log"):
        check_certificate(
            problem, with_certificate(replace(solution, lower_bound=raised), proven_bound=raised)
        )


def test_what_rounding_claims_too_much_is_lowered_to_what_is_proven(by_messages: Case) -> None:
    problem, solution = by_messages
    honest = certified(problem, solution)
    for claim, is_rounding in ((1e-8, True), (1e-4, False)):
        bound = solution.certificate.proven_bound * (1 + claim)
        gap = max(solution.objective - bound, 0.0) / solution.objective
        claimed = with_certificate(replace(solution, lower_bound=bound, gap=gap), proven_bound=bound)
        if is_rounding:
            assert certified(problem, claimed).lower_bound <= honest.lower_bound * (1 + 1e-12)
            check_certificate(problem, certified(problem, claimed))
        else:
            with pytest.raises(CertificateError, match="proof log"):
                certified(problem, claimed)


def test_a_changed_message_is_rejected(by_messages: Case) -> None:
    problem, solution = by_messages
    for place in (0, solution.certificate.messages.size // 2):
        messages = solution.certificate.messages.copy()
        messages[place] += 1e-3
        with pytest.raises(CertificateError, match="proof log"):
            check_certificate(problem, with_certificate(solution, messages=messages))


def test_missing_messages_are_rejected(by_messages: Case) -> None:
    problem, solution = by_messages
    with pytest.raises(CertificateError, match="messages"):
        check_certificate(problem, with_certificate(solution, messages=solution.certificate.messages[:-1]))


def test_a_changed_assignment_is_rejected(by_messages: Case) -> None:
    problem, solution = by_messages
    assignment = solution.assignment.copy()
    assignment[0] = (assignment[0] + 1) % problem.node_costs[0].size
    with pytest.raises(CertificateError, match="assignment costs"):
        check_certificate(problem, replace(solution, assignment=assignment))
    with pytest.raises(CertificateError, match="one of its labels"):
        check_certificate(problem, replace(solution, assignment=assignment + 1000))


def test_a_false_dominance_is_paid_for(by_messages: Case) -> None:
    """Keep only a worse label: the replay charges the difference, and the bound no longer holds."""
    problem, solution = by_messages
    worst = Dominate(node=0, kept=np.array([int(problem.node_costs[0].argmax())]))
    steps = (worst, *(step for step in solution.certificate.steps if getattr(step, "node", 1) != 0))
    with pytest.raises(CertificateError):
        check_certificate(problem, with_certificate(solution, steps=steps))


def test_a_raised_cutoff_is_rejected(with_fixing: Case) -> None:
    problem, solution = with_fixing
    steps = tuple(
        replace(step, messages=np.zeros_like(step.messages)) if isinstance(step, Fix) else step
        for step in solution.certificate.steps
    )
    with pytest.raises(CertificateError):
        check_certificate(problem, with_certificate(solution, steps=steps))


def test_a_negative_multiplier_is_rejected(random_problem: Callable[..., Problem]) -> None:
    problem = random_problem(0, rows=1)
    solution = solve(problem)
    check_certificate(problem, solution)
    with pytest.raises(CertificateError, match="negative"):
        check_certificate(problem, with_certificate(solution, multipliers=(-1e-12,)))


def test_an_exceeded_budget_is_rejected(random_problem: Callable[..., Problem]) -> None:
    problem = random_problem(0, rows=1)
    solution = solve(problem)
    used = evaluate(problem, solution.assignment)[1][0]
    tighter = replace(problem, memory_rows=(replace(problem.memory_rows[0], budget_bytes=0.9 * used),))
    with pytest.raises(CertificateError, match="bytes"):
        check_certificate(tighter, solution)


def test_a_certificate_does_not_fit_a_dearer_claim_on_a_cheaper_problem(by_messages: Case) -> None:
    problem, solution = by_messages
    cheaper = replace(problem, node_costs=(problem.node_costs[0] * 0.5, *problem.node_costs[1:]))
    objective = evaluate(cheaper, solution.assignment)[0]
    claim = replace(solution, objective=objective, gap=0.0, lower_bound=objective)
    with pytest.raises(CertificateError):
        check_certificate(cheaper, claim)


@pytest.mark.parametrize("rows", [0, 1])
def test_a_certificate_survives_json(rows: int, random_problem: Callable[..., Problem]) -> None:
    for seed in range(5):
        problem = random_problem(seed, rows=rows)
        solution = solve(problem)
        back = Certificate.from_dict(json.loads(json.dumps(solution.certificate.to_dict())))
        check_certificate(problem, replace(solution, certificate=back))
        assert replay(problem, back) == replay(problem, solution.certificate)


def one_node(*costs: float) -> Problem:
    return Problem(node_costs=(np.array(costs),), edges=())


def test_a_wrong_objective_is_rejected_down_to_rounding(by_messages: Case) -> None:
    problem, solution = by_messages
    check_certificate(problem, replace(solution, objective=solution.objective * (1 + 1e-11)))
    with pytest.raises(CertificateError, match="assignment costs"):
        check_certificate(problem, replace(solution, objective=solution.objective * (1 + 5e-9)))


def test_only_branch_and_bound_may_claim_more_than_the_log_proves() -> None:
    """A log without steps proves 1 s; 2 s are claimed, which a gap of 0 fits."""
    problem = one_node(2.0, 3.0)
    certificate = Certificate(kind="messages", proven_bound=1.0, ceiling=10.0, messages=np.empty(0))
    claim = Solution(
        assignment=np.array([0]), objective=2.0, lower_bound=2.0, gap=0.0, status=Status.OPTIMAL,
        certificate=certificate, statistics={},
    )  # fmt: skip
    with pytest.raises(CertificateError, match=r"at most 1\.0 s is proven"):
        check_certificate(problem, claim)
    check_certificate(problem, with_certificate(claim, kind="solver"))
    with pytest.raises(CertificateError, match=r"at most 2\.0 s is proven"):
        check_certificate(problem, with_certificate(replace(claim, lower_bound=2.1), kind="solver"))


@pytest.mark.parametrize(("cutoffs", "bound"), [((1.0,), 1.0), ((3.0,), 1.0), ((0.5, 0.25), 0.25), ((0.25, 0.5), 0.25)])
def test_what_a_step_removed_may_cost_no_more_than_its_cutoff(cutoffs: tuple[float, ...], bound: float) -> None:
    """Labels of 1, 5 and 6 s, of which the cheapest are removed: the least cutoff is the bound, and what a cutoff is
    above the removed label is taken off again."""
    steps = tuple(
        Fix(messages=np.empty(0), cutoff=cutoff, kept={0: np.arange(number + 1, 3)})
        for number, cutoff in enumerate(cutoffs)
    )
    certificate = Certificate(kind="messages", proven_bound=1.0, ceiling=10.0, steps=steps, messages=np.empty(0))
    assert replay(one_node(1.0, 5.0, 6.0), certificate) == bound
