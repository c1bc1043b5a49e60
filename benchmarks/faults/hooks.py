"""Point 7: hooks on parameters and submodules, before and behind compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.faults.fault import Fault, Scene, Wrong, fault, make_fault
from benchmarks.faults.victims import Net, backward, batch, compiled, expect_step, expect_value, twin


def _half(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def _on_parameter(model: Any) -> None:
    model.head.weight.register_hook(_half)


def _behind_accumulation(model: Any) -> None:
    def halve(parameter: Any) -> None:
        parameter.grad.mul_(0.5)

    model.head.weight.register_post_accumulate_grad_hook(halve)


def _double_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2.0


def _on_forward(model: Any) -> None:
    model.blocks[0].register_forward_hook(_double_output)


def _before_forward(model: Any) -> None:
    model.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 2.0,))


def _on_backward(model: Any) -> None:
    model.blocks[1].register_full_backward_hook(lambda module, wanted, given: tuple(g * 2.0 for g in wanted))


def _before_backward(model: Any) -> None:
    model.blocks[0].register_full_backward_pre_hook(lambda module, given: tuple(g * 2.0 for g in given))


def _on_the_model(model: Any) -> None:
    model.register_forward_hook(lambda module, args, output: output * 2.0)


HOOKS: Mapping[str, Callable[[Any], None]] = {
    "a gradient hook on a parameter": _on_parameter,
    "a hook behind accumulation on a parameter": _behind_accumulation,
    "a forward hook on a submodule": _on_forward,
    "a forward pre-hook on a submodule": _before_forward,
    "a backward hook on a submodule": _on_backward,
    "a backward pre-hook on a submodule": _before_backward,
    "a forward hook on the model": _on_the_model,
}


def _before_compile(hook: Callable[[Any], None], scene: Scene) -> None:
    model, plain = Net(), Net()
    hook(model)
    hook(plain)
    expected = _stepped(plain)
    module = compiled(scene, model, batch())
    _compare(module, expected)


def _behind_compile(hook: Callable[[Any], None], scene: Scene) -> None:
    module, plain = compiled(scene, Net(), batch()), Net()
    expect_step(module, twin(plain), batch())
    module.zero_grad()
    hook(module)
    hook(plain)
    _compare(module, _stepped(plain))


def _stepped(plain: Any) -> Any:
    """The plain model behind one step: hooks on parameters do not survive a copy."""
    plain.loss = plain(**batch())
    backward(plain.loss)
    return plain


def _compare(module: nn.Module, plain: Any) -> None:
    loss = module(**batch())
    backward(loss)
    expect_value("the loss", loss, plain.loss)
    wanted = dict(plain.named_parameters())
    for name, parameter in module.named_parameters():
        if parameter.grad is None:
            raise Wrong(f"{name} has no gradient")
        expect_value(f"the gradient of {name}", parameter.grad, wanted[name].grad)


def _hooks(run: Callable[..., None], when: str, layouts: tuple[str, ...]) -> tuple[Fault, ...]:
    return tuple(
        make_fault(7, f"{name} {when}".replace(" ", "_"), f"{name} is registered {when} compile", partial(run, hook),
                   layout=layout, right=True, words=("hook",))
        for layout in layouts
        for name, hook in HOOKS.items()
    )  # fmt: skip


EARLIER = _hooks(_before_compile, "before", ("alone", "shard2"))
LATER = _hooks(_behind_compile, "behind", ("alone",))


@fault(7, "a gradient hook on a parameter is registered behind compile", on=("dp2", "tp2"), right=True, words=("hook",))
def parameter_hook_later(scene: Scene) -> None:
    _behind_compile(_on_parameter, scene)


@fault(7, "a forward hook that was there at compile is removed", right=True, words=("hook",))
def removed_hook(scene: Scene) -> None:
    model = Net()
    handle = model.blocks[0].register_forward_hook(_double_output)
    module = compiled(scene, model, batch())
    backward(module(**batch()))
    handle.remove()
    expect_step(module, Net(), batch())


@fault(7, "a forward hook collects activations, as feature extractors do", right=True, words=("hook",),
       warning="hook .* gives nothing back")  # fmt: skip
def collecting_hook(scene: Scene) -> None:
    module, plain = compiled(scene, Net(), batch()), Net()
    seen: dict[str, list[Tensor]] = {"compiled": [], "plain": []}
    for name, each in (("compiled", module), ("plain", plain)):
        each.blocks[0].register_forward_hook(lambda m, args, output, name=name: seen[name].append(output.detach()))
        each(**batch())
    if len(seen["compiled"]) != 1:
        raise Wrong(f"the hook was called {len(seen['compiled'])} times")
    expect_value("what the hook saw", seen["compiled"][0], seen["plain"][0])


@fault(7, "a hook for all modules is registered behind compile", right=True, words=("hook",),
       warning="hook .* gives nothing back")  # fmt: skip
def global_hook(scene: Scene) -> None:
    module, plain = compiled(scene, Net(), batch()), Net()
    called: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, output: called.append(type(m).__name__))
    module(**batch())
    ours = called.count("Linear")
    called.clear()
    plain(**batch())
    handle.remove()
    if ours != called.count("Linear"):
        raise Wrong(f"the hook saw {ours} calls of Linear instead of {called.count('Linear')}")


def _step_of(own: torch.optim.Optimizer, parameter: Tensor) -> None:
    own.step()
    own.zero_grad()


@fault(7, "an optimizer steps inside of hooks behind accumulation, one per parameter", on=("alone", "shard2"),
       right=True, words=("hook",))  # fmt: skip
def steps_in_hooks(scene: Scene) -> None:
    model, plain = Net(), Net()
    module = compiled(scene, model, batch())
    for each in (module, plain):
        for parameter in each.parameters():
            own = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(partial(_step_of, own))
    for seed in range(3):
        backward(module(**batch(seed)))
        backward(plain(**batch(seed)))
    wanted = dict(plain.named_parameters())
    for name, parameter in module.named_parameters():
        expect_value(name, parameter, wanted[name])


@fault(7, "a hook on the loss scales its gradient", on=("alone", "dp2"), right=True)
def hook_on_the_loss(scene: Scene) -> None:
    module, plain = compiled(scene, Net(), batch()), twin(Net())
    for each in (module, plain):
        loss = each(**batch())
        loss.register_hook(_half)
        backward(loss)
    wanted = dict(plain.named_parameters())
    for name, parameter in module.named_parameters():
        expect_value(f"the gradient of {name}", parameter.grad, wanted[name].grad)
