"""Program cache: what earlier questions about one program have worked out, for the next question.

    kept = ProgramCache(32)
    built = kept.built.recall((mesh, prices), lambda: build_problem(...))     works
    built = kept.built.recall((mesh, prices), lambda: build_problem(...))     remembers

A question names everything that the answer depends on; an answer is found again for an equal question only. Who plans
once keeps no problems: a priced one of a large model takes some hundred MB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:  # `import autopar` must not load the solver library
    from autopar.planner.problem.build import Built
    from autopar.planner.problem.factorisation import Factorisation
    from autopar.planner.solver import Solution
    from autopar.program import MicroProgram

Answer = TypeVar("Answer")

FEWEST_PARTS = 8
"""Programs of micro-batches that one question keeps: it asks for the same numbers of them for every way to run. They
are graphs without tables."""


class Memo(Generic[Answer]):
    """Answers by question, the latest `size` of them; questions are compared by ==."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._answers: list[tuple[object, Answer]] = []

    def recall(
        self, question: object, work: Callable[[], Answer], is_final: Callable[[Answer], bool] = lambda answer: True
    ) -> Answer:
        """The answer to an equal question, or `work()`, which is remembered if `is_final` says so."""
        for known, answer in self._answers:
            if known == question:
                return answer
        answer = work()
        if is_final(answer):
            self._answers = [(question, answer), *self._answers][: self._size]
        return answer


class ProgramCache:
    """kernels: kinds of kernels of ours that make programs cheaper; factorisations: of programs; parts: programs of
    micro-batches; built: problems, priced, before the user's constraints; solved: their optima without a memory limit.
    """

    def __init__(self, size: int = 0) -> None:
        self._size = size
        self.forget()

    def forget(self) -> None:
        """Begin anew: the operators' rules are others now."""
        self.kernels: Memo[tuple[str, ...]] = Memo(self._size)
        self.factorisations: Memo[Factorisation] = Memo(self._size)
        self.parts: Memo[MicroProgram] = Memo(max(self._size, FEWEST_PARTS))
        self.built: Memo[Built] = Memo(self._size)
        self.solved: Memo[Solution] = Memo(self._size)
