"""Local processes: results in rank order, reports of rank 0, errors of any rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed

from autopar.errors import AutoparError, VerificationError
from autopar.runtime.local_processes import Report, run_processes

pytestmark = pytest.mark.distributed


def add_ranks(report: Report, factor: int) -> float:
    total = torch.tensor(float(torch.distributed.get_rank() + 1))
    report("before")
    torch.distributed.all_reduce(total)
    return factor * total.item()


def fail_on_second(report: Report, kind: type[Exception]) -> None:
    if torch.distributed.get_rank() == 1:
        raise kind("planted")
    torch.distributed.barrier()


def test_results_come_in_rank_order_and_rank_zero_reports() -> None:
    heard: list[object] = []
    assert run_processes(add_ranks, 2, 10, on_report=heard.append) == [30.0, 30.0]
    assert heard == ["before"]


def test_an_error_of_autopar_is_raised_again() -> None:
    with pytest.raises(VerificationError, match="planted"):
        run_processes(fail_on_second, 2, VerificationError)


def test_any_other_error_names_the_process() -> None:
    with pytest.raises(AutoparError, match="process 1 failed"):
        run_processes(fail_on_second, 2, RuntimeError)
