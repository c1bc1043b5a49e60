"""Capture: an unmodified module and example inputs -> one Program with forward and backward.

The model's tensors are replaced by fake ones while it is traced, so capture needs no weights, no GPU and no memory.
AOT autograd runs the model and its backward pass once and records every operator, with descriptors that say what
every input and output is. Autograd itself runs, so hooks, custom gradients and checkpointed regions count as they do
in training. The tidy passes leave one spelling per operation and give every operator its name.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.modules import transformer

import autopar.ops  # noqa: F401  (registers the operators that capture calls)
from autopar._compat import aot_export_joint_with_descriptors, whole_triton_operators
from autopar.capture.associative_scans import plain_associative_scans
from autopar.capture.blocks.short_traces import trace_by_blocks
from autopar.capture.branches import Notes, check_draws
from autopar.capture.calls import Call, CallRecorder, resized
from autopar.capture.checkpointed_regions import Salts, recomputed_within
from autopar.capture.decompositions import decomposition_table
from autopar.capture.effects import remove_effects
from autopar.capture.expert_layers import adapted_experts
from autopar.capture.failures import NUMPY_HINT, explained
from autopar.capture.fake import fake_parameters, fake_twin
from autopar.capture.fallback import dynamo_forward, replaced_forward
from autopar.capture.gradient_dtype import return_gradients_in
from autopar.capture.huggingface import adapted_huggingface
from autopar.capture.idle_hooks import reported_hooks
from autopar.capture.inputs import FlatInputs, check_signature, find_batch_dims, flatten_inputs
from autopar.capture.known_values import KnownValues, fold_known_shapes
from autopar.capture.module_paths import module_paths
from autopar.capture.precision import REDUCED_IN, canonical_names, precision_dtype
from autopar.capture.python_state import all_attributes, recorded_reads
from autopar.capture.quick_values import QuickValues
from autopar.capture.random_draws import random_decompositions, refuse_other_draws
from autopar.capture.roles import Names, assign_roles
from autopar.capture.training_step import BATCH, LossFunction, TrainingStep
from autopar.capture.user_kernels import refuse_bare_kernels
from autopar.errors import CaptureError
from autopar.passes.random_operators import is_random
from autopar.passes.runner import run_passes
from autopar.passes.tidy.tidy_passes import TIDY_PASSES, TidyContext
from autopar.program import Guard, Input, InputRole, Output, OutputRole, Program
from autopar.timing import phase

log = logging.getLogger(__name__)


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: LossFunction | None = None,
    batch: Any = None,
    batch_dims: Mapping[str, int | None] | None = None,
    training: bool | None = None,
    precision: str | None = None,
    reduce_dtype: str | None = None,
    differentiable: Sequence[str] = (),
    notes: Notes | None = None,
) -> Program:
    """The joint forward and backward graph of `model(*args, **kwargs)` at the global shapes of the arguments.

    loss_fn: `loss_fn(output, batch)` -> 0-dim tensor; the program then returns the loss alone. batch: what loss_fn
        gets; without it the kwargs (or args) themselves; with it the program takes a further keyword `batch`.
    batch_dims: input name -> batch dim or None, where it is not dim 0.
    training: False leaves the backward pass out; default: the model is in training mode and gradients are enabled.
    precision: "bf16" computes with bf16 casts of the parameters (see `precision.py`); default: the model's dtypes.
    reduce_dtype: "fp32" or "bf16", in which gradients of parameters are returned (see `gradient_dtype.py`).
    differentiable: outputs beside the losses through which gradients flow (see `training_step.py`).
    notes: what Python reads of values, guarded (see `branches.py`); default: it may read none.

    The model is left as it was. Raises CaptureError (not a module, inputs that do not fit, data-dependent control
    flow, a loss that is no scalar) and ConfigurationError (batch_dims, precision, differentiable).
    """
    _check_module(model)
    kwargs = dict(kwargs or {})
    check_signature(model, args, kwargs)
    if training is None:
        training = model.training and torch.is_grad_enabled()
    with_batch = loss_fn is not None and batch is not None
    inputs = flatten_inputs(args, {**kwargs, BATCH: batch} if with_batch else kwargs)
    dims = find_batch_dims(inputs.tensor_names, inputs.tensors, batch_dims)
    canonical = canonical_names(model)
    dtype = precision_dtype(precision)
    step = TrainingStep(model, inputs, loss_fn, with_batch, dtype, canonical, differentiable, notes)
    graph_module = _trace_with_fallback(step, inputs, args, kwargs, training)
    names = _names(model, step, inputs, dims, training, canonical)
    program_inputs, program_outputs = assign_roles(graph_module, names)
    return_gradients_in(graph_module, program_inputs, program_outputs, REDUCED_IN[reduce_dtype])
    graph_module = _tidy(graph_module, program_inputs, program_outputs)
    program = Program(
        graph_module=graph_module,
        inputs=program_inputs,
        outputs=program_outputs,
        in_spec=inputs.spec,
        tensor_leaves=inputs.tensor_leaves,
        out_spec=step.outputs.spec,
        output_leaves=_output_leaves(step, program_outputs),
        training=training,
        reads=frozenset(step.reads),
    )
    return replace(program, guards=_checked_guards(step.outputs.guards, program))


def _checked_guards(guards: Sequence[Guard], program: Program) -> tuple[Guard, ...]:
    """The guards, with which of them random draws alone decide over. Raises CaptureError for a drawn number."""
    returned = {output.name: node for node, output in zip(program.returned, program.outputs, strict=True)}
    entries = zip(program.placeholders, program.inputs, strict=True)
    given = {node for node, entry in entries if entry.role in ("input", "parameter")}
    found = tuple(replace(guard, is_drawn=_is_drawn(returned[guard.name], given)) for guard in guards)
    check_draws(found)
    return found


def _is_drawn(node: Node, given: AbstractSet[Node]) -> bool:
    """Whether a value comes from random draws, and not from what is given: inputs and parameters."""
    behind, waiting = {node}, [node]
    while waiting:
        new = [operand for operand in waiting.pop().all_input_nodes if operand not in behind]
        behind.update(new)
        waiting += new
    draws = any(each.op == "call_function" and is_random(each) for each in behind)
    return draws and behind.isdisjoint(given)


def _check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"expected a torch.nn.Module, got {type(model).__name__}; wrap a function in a module that calls it "
            "in its forward"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError("a TorchScript module cannot be captured; pass the module it was made from")


def _trace_with_fallback(
    step: TrainingStep, inputs: FlatInputs, args: Sequence[Any], kwargs: Mapping[str, Any], training: bool
) -> GraphModule:
    """The trace of the model; where numpy stops it, that of Dynamo's graph. Raises the model's CaptureError."""
    try:
        return _trace(step, inputs, kwargs, training)
    except CaptureError as error:
        forward = dynamo_forward(step.model, args, kwargs) if NUMPY_HINT in str(error) else None
        if forward is None:
            raise
        with replaced_forward(step.model, forward):
            try:
                graph_module = _trace(step, inputs, kwargs, training)
            except CaptureError:
                raise error from None
        step.reads = all_attributes(step.model)  # Dynamo read them before
        return graph_module


def _trace(step: TrainingStep, inputs: FlatInputs, kwargs: Mapping[str, Any], training: bool) -> GraphModule:
    """The joint graph (forward-only when not `training`) as AOT autograd returns it."""

    @contextlib.contextmanager
    def watched(each: TrainingStep) -> Iterator[tuple[QuickValues, tuple[Tensor, ...]]]:
        with contextlib.ExitStack() as stack:
            mode = QuickValues(allow_non_fake_inputs=True)
            yield mode, _enter_fake_forward(stack, each, mode, inputs.tensors, kwargs, training)

    joint = functools.partial(_joint_graph, inputs=inputs, kwargs=kwargs, training=training)
    graph_module = trace_by_blocks(step, joint, watched) or joint(step)
    remove_effects(graph_module)
    fold_known_shapes(graph_module)
    refuse_other_draws(graph_module)
    refuse_bare_kernels(graph_module)
    return graph_module


def _joint_graph(
    step: TrainingStep, inputs: FlatInputs, kwargs: Mapping[str, Any], training: bool
) -> GraphModule:
    """One trace of a step, as AOT autograd returns it."""
    salts = Salts()
    with contextlib.ExitStack() as stack:
        mode = KnownValues(allow_non_fake_inputs=True)
        tensors = _enter_fake_forward(stack, step, mode, inputs.tensors, kwargs, training)
        stack.enter_context(module_paths(step))
        stack.enter_context(reported_hooks(step.model))
        step.reads = stack.enter_context(recorded_reads(step.model))
        stack.enter_context(whole_triton_operators())
        stack.enter_context(recomputed_within(salts.mark))
        table = {**decomposition_table(), **random_decompositions(salts)}
        joint = aot_export_joint_with_descriptors(stack, step, tensors, decompositions=table)
        graph_module: GraphModule = joint.graph_module
        _check_state(step, tensors, mode)
    return graph_module


def _enter_fake_forward(
    stack: contextlib.ExitStack,
    step: TrainingStep,
    mode: KnownValues,
    tensors: Sequence[Tensor],
    kwargs: Mapping[str, Any],
    training: bool,
) -> tuple[Tensor, ...]:
    """Until `stack` closes, `step` runs on the fake twins of the tensors, which are returned."""
    stack.enter_context(fake_parameters(step, mode))
    stack.enter_context(traced_alike(step, kwargs, training))
    twins = tuple(fake_twin(tensor, mode) for tensor in tensors)
    return twins if training else tuple(twin.detach() for twin in twins)


@contextlib.contextmanager
def traced_alike(step: TrainingStep, kwargs: Mapping[str, Any], training: bool) -> Iterator[None]:
    """Within the context Python goes through the forward of `step` as a trace does, whatever its tensors are."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_plain_transformer_layers())
        stack.enter_context(_known_as_export())
        stack.enter_context(_dense_gradients(step))
        stack.enter_context(adapted_huggingface(step, kwargs))
        stack.enter_context(adapted_experts())
        stack.enter_context(plain_associative_scans())
        stack.enter_context(explained(step.model, step.takes_branches))
        stack.enter_context(torch.set_grad_enabled(training))
        yield


def forward_calls(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    shapes: Sequence[tuple[int, ...]],
    *,
    loss_fn: LossFunction | None,
    batch: Any,
    training: bool,
    precision: str | None,
) -> tuple[Call, ...]:
    """The operators that the forward runs for arguments like these with tensors of `shapes`; nothing is traced."""
    with_batch = loss_fn is not None and batch is not None
    inputs = flatten_inputs(args, {**kwargs, BATCH: batch} if with_batch else kwargs)
    step = TrainingStep(model, inputs, loss_fn, with_batch, precision_dtype(precision), canonical_names(model))
    with contextlib.ExitStack() as stack:
        mode, given = QuickValues(allow_non_fake_inputs=True), resized(inputs.tensors, shapes)
        tensors = _enter_fake_forward(stack, step, mode, given, kwargs, training)
        with CallRecorder() as recorder:
            step(*tensors)
    return tuple(recorder.calls)


def _check_state(step: TrainingStep, tensors: Sequence[Tensor], mode: KnownValues) -> None:
    """Report what forward leaves on the modules; raises CaptureError where a later call would need it."""
    step.state.report()
    if step.state.stores_tensors():
        with torch.no_grad(), fake_parameters(step, mode):  # a module with two names keeps the tensors of the trace
            trained = [parameter for parameter in step.parameters() if parameter.requires_grad]
            step.state.check_next_call(lambda: step(*tensors), (tensors, trained))


@contextlib.contextmanager
def _known_as_export() -> Iterator[None]:
    """`torch.compiler.is_exporting()` is true: libraries then leave out what needs the values of tensors.

    So do the distributions of torch, whose checks of their parameters only raise.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.distributions.Distribution, "_validate_args", False))
        for flag in ("_is_compiling_flag", "_is_exporting_flag"):
            stack.enter_context(mock.patch.object(torch.compiler, flag, True))
        stack.enter_context(mock.patch.object(torch, "cond", _refuse_cond))
        yield


def _refuse_cond(*_: Any, **__: Any) -> None:
    raise CaptureError(
        "torch.cond keeps two graphs of which one runs, and a plan is for one: compute both sides and choose with "
        "torch.where(condition, a, b)"
    )


@contextlib.contextmanager
def _dense_gradients(step: TrainingStep) -> Iterator[None]:
    """Embeddings with sparse=True get dense gradients, which collectives can reduce."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    sparse = [name for name, m in step.model.named_modules() if isinstance(m, kinds) and m.sparse]
    if sparse:
        log.warning("sparse gradients become dense ones (the same values): %s", ", ".join(sparse))
    with contextlib.ExitStack() as stack:
        for name in sparse:
            stack.enter_context(mock.patch.object(step.model.get_submodule(name), "sparse", False))
        yield


@contextlib.contextmanager
def _plain_transformer_layers() -> Iterator[None]:
    """nn.Transformer without its fused inference path, which no rule knows, and without reading whether a mask that
    was passed is causal: the mask itself is used."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with mock.patch.object(transformer, "_detect_is_causal_mask", lambda mask, is_causal, size: bool(is_causal)):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _names(
    model: nn.Module,
    step: TrainingStep,
    inputs: FlatInputs,
    dims: Sequence[int | None],
    training: bool,
    canonical: dict[str, str],
) -> Names:
    trained: set[tuple[InputRole | OutputRole, str]] = {
        ("parameter", name) for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    trained |= {("input", n) for n, t in zip(inputs.tensor_names, inputs.tensors, strict=True) if t.requires_grad}
    trained |= {("output", name) for name in step.outputs.requires_grad}
    return Names(
        inputs=inputs.tensor_names,
        batch_dims=dims,
        outputs=step.outputs.names,
        guards=frozenset(guard.name for guard in step.outputs.guards),
        loss=step.outputs.loss,
        canonical=canonical,
        requires_grad=frozenset(trained) if training else frozenset(),
    )


@phase("tidy", logging.INFO)
def _tidy(graph_module: GraphModule, inputs: Sequence[Input], outputs: Sequence[Output]) -> GraphModule:
    placeholders = [node.name for node in graph_module.graph.nodes if node.op == "placeholder"]
    context = TidyContext(
        tangents=frozenset(n for n, value in zip(placeholders, inputs, strict=True) if value.role == "tangent"),
        num_forward_outputs=sum(output.role != "gradient" for output in outputs),
    )
    graph_module, _ = run_passes(graph_module, TIDY_PASSES, context)
    return graph_module


def _output_leaves(step: TrainingStep, outputs: Sequence[Output]) -> tuple[Any, ...]:
    """The leaves of the user's output as indices into the program's outputs."""
    first = sum(output.role == "mutation" for output in outputs)
    return tuple(first + leaf if isinstance(leaf, int) else leaf for leaf in step.outputs.leaves)
