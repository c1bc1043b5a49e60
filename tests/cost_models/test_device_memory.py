
import pytest
import torch

from autopar.cost_models.device_memory import (
    OPTIMIZER_STATE_BYTES,
    measured_state_bytes,
    optimizer_state_bytes,
)
from autopar.errors import ConfigurationError


@pytest.mark.parametrize(
    "optimizer", [c for n in OPTIMIZER_STATE_BYTES if (c := getattr(torch.optim, n, None)) is not None]
)
def test_the_table_holds_what_each_torch_optimizer_allocates(optimizer) -> None:
    assert optimizer_state_bytes(optimizer) == measured_state_bytes(optimizer)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.Adam, {"amsgrad": True}),
    ],
)
def test_options_that_add_state_are_counted(optimizer, options) -> None:
    assert optimizer_state_bytes(optimizer, options=options) == measured_state_bytes(optimizer, options=options)


def test_state_follows_the_dtype_and_a_master_copy_adds_four_bytes() -> None:
    assert optimizer_state_bytes("AdamW", parameter_dtype=torch.bfloat16) == 4
    assert measured_state_bytes(torch.optim.AdamW, parameter_dtype=torch.bfloat16) == 4
    assert optimizer_state_bytes("adamw", parameter_dtype=torch.bfloat16, float32_master=True) == 12
    assert optimizer_state_bytes("AdamW", float32_master=True) == 8


def test_an_unknown_class_is_measured_and_an_unknown_name_is_an_error() -> None:
    class Heavy(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter].update(a=torch.zeros_like(parameter), b=parameter.double(), step=torch.zeros(()))

    assert optimizer_state_bytes(Heavy) == 12
    with pytest.raises(ConfigurationError, match="Heavy"):
        optimizer_state_bytes("Heavy")
