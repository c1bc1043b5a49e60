"""Every private symbol of torch that autopar uses, in one place.

Supported are torch 2.11 to 2.14; pyproject.toml caps it there. A newer torch imports with a warning: if a symbol moved,
this module is where the import fails and the only file to change (`tests/test_compat.py` names each symbol).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._C._distributed_c10d import PrefixStore, Store, _resolve_process_group
from torch._decomp import get_decompositions
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    ForwardTokenAOTInput,
    ForwardTokenAOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.effects import with_effects
from torch._library.custom_ops import OPDEFS
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import profiler
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed._composable.contract import STATE_KEY as STATES_OF_WRAPPERS
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import _Namespace as NameSpace
from torch.nn.modules import module as modules
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import (
    SUPPORTED_NODES,
    TreeSpec,
    keystr,
    register_dataclass,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

NEWEST_TESTED_TORCH = (2, 14)
"""All tests run with torch of constraints.txt; with 2.14.1 test_compat, the quickstart and the parity of captures."""

grouped_mm = torch._grouped_mm
foreach_copy_ = torch._foreach_copy_
"""Copies a list of tensors into another one; on CUDA by few kernels."""

GLOBAL_HOOKS: Mapping[str, Any] = {
    kind: getattr(modules, f"_global{kind}")
    for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
}
"""The hooks of all modules, of every kind, under the names that a module has for its own."""


class Graph(fx.Graph):
    """A graph whose nodes are made several times as fast: torch walks through all arguments of every new node in search
    of symbolic sizes, of which the graphs that we write have none, and writes of a copy's meta into its tables twice.
    """

    def create_node(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        name: str | None = None,
        type_expr: Any | None = None,
    ) -> fx.Node:
        """As torch's."""
        node = super().create_node(op, target, name=name, type_expr=type_expr)
        node._update_args_kwargs(args or (), kwargs or {})
        return node

    def node_copy(self, node: fx.Node, arg_transform: Callable[[fx.Node], Any] = lambda x: x) -> fx.Node:
        """As torch's."""
        args, kwargs = fx.node.map_arg(node.args, arg_transform), fx.node.map_arg(node.kwargs, arg_transform)
        copy = self.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        copy.meta.update(node.meta)
        return copy


def torch_version(text: str = torch.__version__) -> tuple[int, int]:
    """(major, minor) of a torch version string: `2.13.0+cpu` -> (2, 13)."""
    match = re.match(r"(\d+)\.(\d+)", text)
    assert match is not None, f"torch reports the version {text!r}"
    return int(match[1]), int(match[2])


def warn_about_untested_torch(text: str = torch.__version__) -> None:
    """Warn when torch is newer than the newest version that autopar was tested with."""
    if torch_version(text) > NEWEST_TESTED_TORCH:
        newest = ".".join(map(str, NEWEST_TESTED_TORCH))
        warnings.warn(f"autopar is tested with torch up to {newest}, this is {text}", stacklevel=2)


def map_symmetric_memory(group: str, nbytes: int) -> None:
    """Let the ranks of a group map so many bytes of each other's GPU memory, as torch's operators in symmetric memory
    would at their first call; all ranks call it alike. Raises RuntimeError where they cannot."""
    symmetric_memory.get_symm_mem_workspace(distributed_c10d.GroupName(group), min_size=nbytes)


def is_registered(kind: type) -> bool:
    """Whether torch's pytrees know the structure of a class; named tuples count."""
    return kind in SUPPORTED_NODES or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def aot_export_joint_with_descriptors(*args: Any, **kwargs: Any) -> Any:
    """torch's function of this name, loaded by the first call: its module loads torch._dynamo, and that Triton."""
    module = importlib.import_module("torch._functorch.aot_autograd")
    return module.aot_export_joint_with_descriptors(*args, **kwargs)


@contextlib.contextmanager
def recorded_names() -> Iterator[Callable[[fx.Graph], list[tuple[str, str]]]]:
    """Gives a function of a graph that was made within the context: the names asked for in it and those it gave, in
    order, also those of nodes that it no longer holds."""
    names: dict[int, list[tuple[str, str]]] = {}
    spaces: list[Any] = []  # so that no id comes again
    original = NameSpace.create_name

    def create_name(space: NameSpace, candidate: str, obj: object | None) -> str:
        name = original(space, candidate, obj)
        if obj is None:
            if id(space) not in names:
                spaces.append(space)
            names.setdefault(id(space), []).append((candidate, name))
        return name

    with mock.patch.object(NameSpace, "create_name", create_name):
        yield lambda graph: names.get(id(graph._graph_namespace), [])


def compile_fx(graph_module: fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
    """inductor's compilation of a graph for tensors of the forms of `examples`, without autograd or guards; loaded by
    the first call, since its module loads torch._dynamo and Triton. The result takes the tensors one by one.

    Examples are fake tensors with a shape environment, whose sizes are numbers all the same: without one inductor does
    not look into its cache on disk, and other ranks and later runs compile again."""
    module = importlib.import_module("torch._inductor.compile_fx")
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = [mode.from_tensor(example, static_shapes=True) for example in examples]
    with tracing(TracingContext(mode)):
        found: Callable[..., Any] = module.compile_fx(graph_module, fakes)
    return found


def compilation_folder() -> Path:
    """Where inductor keeps on disk what it compiled; all processes of a user and machine share it."""
    return Path(importlib.import_module("torch._inductor.runtime.cache_dir_utils").cache_dir())


def whole_triton_operators() -> AbstractContextManager[None]:
    """Within the context, a trace keeps operators of `torch.library.triton_op` and does not open them."""
    context: AbstractContextManager[None] = functorch_config.patch(decompose_custom_triton_ops=False)
    return context


def is_kernel_launch(target: object) -> bool:
    """Whether the target of a node launches a Triton kernel outside of an operator."""
    return isinstance(target, HigherOrderOperator) and str(target).startswith("triton_kernel_wrapper")


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` made the module, which then holds the plain one as `_orig_mod`. A process that has not
    loaded torch._dynamo (seconds of import) has none."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


@functools.cache
def keep_dynamo_out(kind: type[nn.Module]) -> None:
    """Once per process: `torch.compile` of a module of this class runs its forward as it is. Loads torch._dynamo."""
    kind.forward = torch.compiler.disable(kind.forward)  # type: ignore[no-untyped-call]


def release_saved_tensors(ctx: Any) -> None:
    """In the backward of an autograd.Function: drop what `ctx.save_for_backward` kept, unless the caller asked for
    retain_graph. torch's own compiled functions do it so."""
    ctx.maybe_clear_saved_tensors()


def storage_references(tensor: torch.Tensor) -> int:
    """How many hold the memory of a tensor: tensors of the same storage, with one or two more that are always there."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def profiler_is_on() -> bool:
    """Whether a profiler of torch records."""
    return profiler._is_profiler_enabled


def forget_device_meshes() -> None:
    """Drop what DTensor remembers of meshes. It takes meshes of equal ranks and names for one, so that a process which
    makes a new process group finds the groups of the old one behind them."""
    importlib.import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()


def share_gradient_hooks(old: torch.Tensor, new: torch.Tensor) -> int:
    """Make the gradient hooks of a leaf those of `new` too, so that their handles remove them there; how many."""
    count = 0
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(old, name)
        if hooks:
            setattr(new, name, hooks)
            count += len(hooks)
    return count


def lone_device_mesh(device_type: str, axis_names: tuple[str, ...]) -> DeviceMesh:
    """A mesh of this one process, all axes of size 1, without any process group."""
    ranks = torch.zeros((1,) * len(axis_names), dtype=torch.int)
    return DeviceMesh(device_type, ranks, mesh_dim_names=axis_names, _init_backend=False, _rank=0)


def dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """The DTensor of this spec, without autograd: what torch's own operators make of their results."""
    made: DTensor = DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]  # torch gives it no types
    return made


def storage_info(file: str, offset: int, length: int) -> Any:
    """What an index of torch.distributed.checkpoint says of where a value lies in a folder. Its module takes long to
    load, and only who writes checkpoints needs it."""
    return importlib.import_module("torch.distributed.checkpoint.filesystem")._StorageInfo(file, offset, length)


def order_strided_shards(order_of: Callable[[int], Sequence[int] | None]) -> None:
    """From now on a strided shard cuts a dim that was put in an order first, where its split factor is one for which
    `order_of` has one: how DTensor cuts a whole, and puts one together again, follows from that."""
    split: Any = StridedShard._split_tensor

    def ordered(
        self: Any, tensor: torch.Tensor, num_chunks: int, *, with_padding: bool = True, contiguous: bool = True
    ) -> tuple[list[torch.Tensor], list[int]]:
        order = order_of(int(self.split_factor))
        if order is None:
            found: tuple[list[torch.Tensor], list[int]]
            found = split(self, tensor, num_chunks, with_padding=with_padding, contiguous=contiguous)
            return found
        index = torch.tensor(order, device=tensor.device)
        return list(tensor.index_select(self.dim, index).chunk(num_chunks, self.dim)), [0] * num_chunks * with_padding

    StridedShard._split_tensor = ordered  # type: ignore[method-assign]


def dtensor_operators() -> dict[OpOverload, Callable[..., Any]]:
    """The operators that DTensor does not run as its layouts say, but by a function of (operator, args, kwargs)."""
    operators: dict[OpOverload, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers
    return operators


def value_of_constant(tensor: torch.Tensor) -> torch.Tensor | None:
    """The real tensor behind a tensor of a trace, where the trace knows it; None where it does not."""
    if isinstance(tensor, FunctionalTensor):
        tensor.sync()
        tensor = torch._from_functional_tensor(tensor.elem)
    if isinstance(tensor, FakeTensor):
        return tensor.constant
    return None if tensor.is_meta else tensor.detach()


def fake_result(mode: FakeTensorMode, func: OpOverload[Any, Any], args: Any, kwargs: Any, leaves: list[Any]) -> Any:
    """What an operator makes of fake tensors of `mode`, by its meta kernel alone; leaves: of args and kwargs."""
    with in_kernel_invocation_manager(mode):
        result = func(*args, **kwargs)
    wrapped: Any = mode.wrap_meta_outputs_with_default_device_logic
    return wrapped(result, func, leaves, device=None)


def custom_implementation(operator: OpOverload[Any, Any]) -> Callable[..., Any] | None:
    """The Python function behind an operator of `torch.library.custom_op`, for every device without one of its own."""
    found = OPDEFS.get(operator._schema.name)
    return None if found is None else found._init_fn


def without_torch_function() -> AbstractContextManager[None]:
    """Within the context, `__torch_function__` of tensor subclasses is not asked."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


def resolve_group(name: str) -> ProcessGroup:
    """The process group that collectives in graphs name so."""
    named: Any = name  # torch 2.13 gives these names a type of their own
    group: ProcessGroup = _resolve_process_group(named)
    return group


def default_timeout() -> timedelta:
    """How long a collective of CPU tensors may take, as it was given to `init_process_group`; groups made later on
    have forgotten it."""
    world = distributed_c10d._get_default_group()
    timeout: timedelta = world._get_backend(torch.device("cpu")).options._timeout
    return timeout


def default_store() -> Store:
    """The key-value store through which the running processes found each other."""
    store: Store = distributed_c10d._get_default_store()
    return store


def store_connection(name: str) -> Store:
    """A connection to that store, which no wait on another one holds up; its keys are apart, under `name`."""
    store: Any = default_store()
    return PrefixStore(name, store.clone())


def all_groups() -> list[ProcessGroup]:
    """The process groups of this process that other ranks belong to as well."""
    return [group for group in list(distributed_c10d._world.pg_map) if group.size() > 1]


def torch_flight_record() -> list[dict[str, Any]]:
    """The entries of torch's flight recorder, oldest first: calls of NCCL or gloo with number, sizes and state; empty
    where there is none, or `TORCH_FR_BUFFER_SIZE=0`."""
    found: list[dict[str, Any]] = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # the first in builds with NCCL only
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            found += json.loads(dump()).get("entries", [])
    return found


warn_about_untested_torch()

__all__ = [
    "GLOBAL_HOOKS",
    "NEWEST_TESTED_TORCH",
    "STATES_OF_WRAPPERS",
    "BufferAOTInput",
    "DTensorSpec",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "ForwardTokenAOTInput",
    "ForwardTokenAOTOutput",
    "FunctionalTensor",
    "GradAOTOutput",
    "Graph",
    "HigherOrderOperator",
    "InputMutationAOTOutput",
    "LazyGraphModule",
    "NameSpace",
    "OpOverload",
    "OpOverloadPacket",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "PrefixStore",
    "Store",
    "StridedShard",
    "TangentAOTInput",
    "TreeSpec",
    "all_groups",
    "aot_export_joint_with_descriptors",
    "compilation_folder",
    "compile_fx",
    "custom_implementation",
    "default_store",
    "default_timeout",
    "dtensor",
    "dtensor_operators",
    "fake_result",
    "foreach_copy_",
    "forget_device_meshes",
    "get_decompositions",
    "grouped_mm",
    "is_compiled",
    "is_kernel_launch",
    "is_registered",
    "keep_dynamo_out",
    "keystr",
    "lone_device_mesh",
    "map_symmetric_memory",
    "no_dispatch",
    "order_strided_shards",
    "profiler_is_on",
    "recorded_names",
    "register_dataclass",
    "release_saved_tensors",
    "resolve_group",
    "share_gradient_hooks",
    "storage_info",
    "storage_references",
    "store_connection",
    "symmetric_memory",
    "torch_flight_record",
    "torch_version",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "value_of_constant",
    "warn_about_untested_torch",
    "whole_triton_operators",
    "with_effects",
    "without_torch_function",
]
