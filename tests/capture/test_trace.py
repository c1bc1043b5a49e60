"""What capture makes of losses, outputs, phases, frozen and unused parameters, dropout, and of wrong input."""

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.capture import capture
from autopar.errors import CaptureError, ConfigurationError
from autopar.program import Constant, Program
from tests.capture.execute import outputs_of, run_program

X = torch.randn(6, 4)


class Net(nn.Module):
    """One trained, one frozen, one unused layer, and dropout."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.dropout(self.frozen(self.first(x))) * scale


def roles(program: Program) -> list[tuple[str, str]]:
    return [(output.role, output.name) for output in program.outputs]


def targets(program: Program) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def test_logits_have_a_tangent_and_only_trained_parameters_a_gradient() -> None:
    program = capture(Net(), (X,))
    assert roles(program) == [("output", "output"), ("gradient", "first.weight"), ("gradient", "first.bias")]
    assert [(i.role, i.name) for i in program.inputs][-2:] == [("input", "args.0"), ("tangent", "output")]
    assert {i.name for i in program.inputs if i.requires_grad} == {
        "first.weight", "first.bias", "unused.weight", "unused.bias",
    }  # fmt: skip


def test_loss_function_gets_the_arguments() -> None:
    program = capture(Net(), (), {"x": X}, loss_fn=lambda output, batch: (output - batch["x"]).pow(2).mean())
    model = Net()
    (loss,) = outputs_of(program, run_program(program, model, (), {"x": X}), "loss").values()
    torch.testing.assert_close(loss, (model(X) - X).pow(2).mean())


def test_batch_of_the_loss_function_is_an_input() -> None:
    target = torch.randn(6, 4)
    program = capture(
        Net(), (X,), loss_fn=lambda output, batch: functional.mse_loss(output, batch["y"]), batch={"y": target}
    )
    assert [(i.name, i.batch_dim) for i in program.inputs if i.role == "input"] == [("args.0", 0), ("batch.y", 0)]
    model = Net()
    values = run_program(program, model, (X,), {"batch": {"y": target}})
    torch.testing.assert_close(outputs_of(program, values, "loss")["loss"], functional.mse_loss(model(X), target))


def test_outputs_beside_the_loss_are_detached() -> None:
    class WithLoss(Net):
        def forward(self, x: Tensor) -> dict[str, Tensor | int | None]:  # type: ignore[override]
            logits = super().forward(x)
            return {"loss": logits.mean(), "logits": logits, "none": None, "count": 3}

    program = capture(WithLoss(), (X,))
    assert roles(program)[:2] == [("loss", "loss"), ("output", "logits")]
    assert [i.name for i in program.inputs if i.role == "tangent"] == ["loss"]
    assert program.output_leaves == (0, 1, Constant(None), Constant(3))


@pytest.mark.parametrize("how", ["eval", "no_grad", "argument"])
def test_without_training_there_is_no_backward(how: str) -> None:
    model = Net().eval() if how == "eval" else Net()
    with torch.set_grad_enabled(how != "no_grad"):
        program = capture(model, (X,), training=False if how == "argument" else None)
    assert not program.training
    assert roles(program) == [("output", "output")]
    assert {node.meta["phase"] for node in program.graph.nodes if node.op != "output"} == {"forward"}


def test_outputs_that_share_memory_are_copied() -> None:
    class Aliasing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            hidden = self.linear(x)
            return x, x.view(2, 12), hidden, hidden.view(2, 12), self.linear.weight

    model = Aliasing()
    program = capture(model, (X,))
    values = run_program(program, model, (X,), {})
    for actual, expected in zip(values, model(X), strict=False):
        torch.testing.assert_close(actual, expected.detach())
    weight_gradient = outputs_of(program, values, "gradient")["linear.weight"]
    torch.testing.assert_close(weight_gradient, 2 * X.sum(0).expand(4, 4) + 1)


def test_batch_norm_returns_its_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    program = capture(model, (X,))
    values = run_program(program, model, (X,), {})
    model(X)
    mutated = outputs_of(program, values, "mutation")
    assert set(mutated) == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
    for name, value in mutated.items():
        torch.testing.assert_close(value, dict(model.named_buffers())[name])


def test_dropout_and_attention_have_their_own_salts() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1)
            self.attention = nn.MultiheadAttention(16, 2, dropout=0.2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.encoder(x)
            return self.attention(y, y, y, need_weights=True)[0]

    program = capture(Encoder(), (torch.randn(2, 5, 16),))
    kinds = (torch.ops.autopar.attention.default, torch.ops.autopar.dropout.default)
    random = [node for node in program.graph.nodes if node.target in kinds]
    assert len(random) == 5  # attention and three dropouts of the layer, the weights of the second attention
    assert [node.args[-1] for node in random] == [0, 1, 2, 3, 4]
    assert not any("bernoulli" in target or "native_dropout" in target for target in targets(program))


def test_inference_of_an_encoder_layer_is_not_fused() -> None:
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    program = capture(model, (torch.randn(2, 5, 16),))
    assert "autopar.attention.default" in targets(program)
    assert not any("encoder_layer" in target for target in targets(program))


def test_mask_that_is_trained_keeps_its_gradient() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(5, 5))

        def forward(self, x: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(x, x, x, self.bias).pow(2).sum()

    model, x = Biased(), torch.randn(2, 3, 5, 4)
    program = capture(model, (x,))
    assert "autopar.attention_backward_with_mask.default" in targets(program)
    model(x).backward()
    values = run_program(program, model, (x,), {})
    torch.testing.assert_close(outputs_of(program, values, "gradient")["bias"], model.bias.grad)


def test_constants_of_the_code_are_written_out() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
            self.shift = nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale + self.shift) * torch.tensor(3.0)

    model = Scaled()
    program = capture(model, (X,))
    assert {node.op for node in program.graph.nodes} == {"placeholder", "call_function", "output"}
    torch.testing.assert_close(run_program(program, model, (X,), {})[0], model(X).detach())


def test_recurrent_weights_are_restored() -> None:
    model = nn.LSTM(4, 4)
    weights = list(model._flat_weights)
    capture(model, (torch.randn(3, 2, 4),))
    assert all(a is b for a, b in zip(weights, model._flat_weights, strict=True))


def test_inputs_without_batch_are_replicated(caplog: pytest.LogCaptureFixture) -> None:
    class Two(Net):
        def forward(self, x: Tensor, y: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) + y + table.sum()

    with caplog.at_level(logging.INFO, logger="autopar"):
        program = capture(Two(), (X, X, torch.randn(3, 4)))
    assert [i.batch_dim for i in program.inputs if i.role == "input"] == [0, 0, None]
    assert "args.2" in caplog.text


def test_batch_dims_override() -> None:
    program = capture(Net(), (X,), batch_dims={"args.0": None})
    assert [i.batch_dim for i in program.inputs if i.role == "input"] == [None]
    with pytest.raises(ConfigurationError, match=r"names \['x'\], but the inputs are \['args.0'\]"):
        capture(Net(), (X,), batch_dims={"x": 0})


def test_not_a_module() -> None:
    with pytest.raises(CaptureError, match=r"expected a torch\.nn\.Module, got function"):
        capture(lambda x: x, (X,))  # type: ignore[arg-type]


def test_inputs_that_do_not_fit_are_named() -> None:
    with pytest.raises(CaptureError, match=r"do not fit Net\.forward: .*'x'.*given: input_idz"):
        capture(Net(), (), {"input_idz": X})


def test_wrong_shapes_name_the_line() -> None:
    with pytest.raises(CaptureError, match=r"Net cannot be traced at .*test_trace\.py:\d+ .*reduction dim"):
        capture(Net(), (torch.randn(3, 5),))


def test_data_dependent_branch_names_the_line() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(CaptureError, match=r"Branch decides by the values of a tensor at .*test_trace\.py:\d+ .*sum"):
        capture(Branch(), (X,))


def test_loss_must_be_a_scalar() -> None:
    with pytest.raises(CaptureError, match=r"loss_fn has shape \(6, 4\); a loss must be a scalar"):
        capture(Net(), (X,), loss_fn=lambda output, batch: output)


def test_output_of_unknown_type_is_named() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> dict[str, object]:
            return {"x": x + 1, "odd": object()}

    with pytest.raises(CaptureError, match="output odd is a object"):
        capture(Odd(), (X,))


def test_attention_without_heads_is_our_operator_too() -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.project(x)
            mask = torch.ones(5, 5, dtype=torch.bool).tril()
            return functional.scaled_dot_product_attention(y, y, y, mask.expand(2, 5, 5)).pow(2).sum()

    model, x = Single(), torch.randn(2, 5, 4)
    program = capture(model, (x,))
    assert targets(program).count("autopar.attention.default") == 1
    model(x).backward()
    values = run_program(program, model, (x,), {})
    torch.testing.assert_close(outputs_of(program, values, "gradient")["project.weight"], model.project.weight.grad)


class GradientOfBuffer(nn.Module):
    """Begins a sum of losses with a buffer that asks for a gradient, as vector-quantize-pytorch does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("zero", torch.tensor(0.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        loss = self.zero
        loss.requires_grad_()
        return loss + self.layer(x).square().mean()


def test_a_buffer_that_asks_for_a_gradient_gets_none(caplog: pytest.LogCaptureFixture) -> None:
    program = capture(GradientOfBuffer(), (X,), {})
    assert roles(program) == [("loss", "loss"), ("gradient", "layer.weight"), ("gradient", "layer.bias")]
    assert "a gradient of the buffer zero" in caplog.text
