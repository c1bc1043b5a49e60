"""Model states: ZeRO's table 1 to its digits, Megatron's distributed optimizer, and what no degree may do."""

from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

import pytest

from autopar.errors import ConfigurationError
from benchmarks.validation.model_states import MEGATRON, ZERO_PAPER, StateDtypes, ZeroStage, state_bytes

DEGREES = (1, 4, 16, 64, 256, 1024)
# Rajbhandari et al. 2020 (arXiv 1910.02054), table 1: GB per device of 7.5B, 128B and 1T parameters
TABLE_1: dict[float, dict[ZeroStage, tuple[str, ...]]] = {
    7.5e9: {
        1: ("120", "52.5", "35.6", "31.4", "30.4", "30.1"),
        2: ("120", "41.3", "21.6", "16.6", "15.4", "15.1"),
        3: ("120", "30", "7.5", "1.88", "0.47", "0.12"),
    },
    128e9: {
        1: ("2048", "896", "608", "536", "518", "513"),
        2: ("2048", "704", "368", "284", "263", "257"),
        3: ("2048", "512", "128", "32", "8", "2"),
    },
    1e12: {
        1: ("16000", "7000", "4750", "4187", "4046", "4011"),
        2: ("16000", "5500", "2875", "2218", "2054", "2013"),
        3: ("16000", "4000", "1000", "250", "62.5", "15.6"),
    },
}
CELLS = [
    (parameters, stage, degree, printed)
    for parameters, stages in TABLE_1.items()
    for stage, row in stages.items()
    for degree, printed in zip(DEGREES, row, strict=True)
]


def printed_alike(value: float, printed: str) -> bool:
    """Whether a value rounds, or is cut, to the printed digits; the paper's table does both (4187.5 is 4187 there)."""
    exact, unit = Decimal(repr(value)), Decimal(1).scaleb(Decimal(printed).as_tuple().exponent)
    return Decimal(printed) in {exact.quantize(unit, mode) for mode in (ROUND_HALF_UP, ROUND_DOWN)}


@pytest.mark.parametrize(("parameters", "stage", "degree", "printed"), CELLS)
def test_zero_table_1(parameters: float, stage: ZeroStage, degree: int, printed: str) -> None:
    assert printed_alike(state_bytes(parameters, ZERO_PAPER, stage, degree) / 1e9, printed)


def test_the_table_has_its_54_cells_and_catches_a_wrong_byte() -> None:
    assert len(CELLS) == 54
    wrong = StateDtypes(gradient=2.0, optimizer=11.0)
    assert not all(printed_alike(state_bytes(p, wrong, stage, d) / 1e9, text) for p, stage, d, text in CELLS)
    swapped = [(p, 2 if stage == 1 else stage, d, text) for p, stage, d, text in CELLS]
    assert not all(printed_alike(state_bytes(p, ZERO_PAPER, stage, d) / 1e9, text) for p, stage, d, text in swapped)


@pytest.mark.parametrize("degree", [1, 2, 8])
def test_megatrons_distributed_optimizer_is_stage_1_with_a_whole_gradient_buffer(degree: int) -> None:
    assert state_bytes(1000.0, MEGATRON, 1, degree) == pytest.approx(1000.0 * (6 + 12 / degree))
    assert state_bytes(1000.0, MEGATRON, 0, degree) == 18_000.0


def test_a_degree_below_one_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        state_bytes(1.0, MEGATRON, 1, 0)
