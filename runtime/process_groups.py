"""Process groups: the mesh of a plan on the running processes, and one group per set of axes.

    groups = ProcessGroups(Mesh(("dp_shard", "tp"), (2, 2)), "cpu")
    groups.device_mesh                   # the DeviceMesh of every DTensor of the module
    groups.name("dp_shard+tp")           # name of the group that spans both axes

Lowered graphs name groups by their axes, joined by "+" in mesh order. A set of axes becomes one real group, created
once; all ranks create all groups in the same order. A world of one needs no process group at all. The ranks of a
pipeline have a mesh per rank group (`StageProcesses`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar._compat import lone_device_mesh
from autopar.errors import PlanMismatchError
from autopar.layouts.placement import Mesh
from autopar.plans.parallel_plan import Plan
from autopar.runtime.host_memory.host_allocator import keep_freed_memory


def world_size() -> int:
    """Processes of the running process group; one where there is none."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Rank in the running process group; 0 where there is none."""
    return dist.get_rank() if dist.is_initialized() else 0


def subgroups(mesh: Mesh, axes: tuple[int, ...]) -> list[list[int]]:
    """Ranks of every group that spans `axes`, ascending; inside a group the last axis runs fastest."""
    others = [axis for axis in range(len(mesh.shape)) if axis not in axes]
    groups: dict[tuple[int, ...], list[int]] = {}
    for member, coordinate in enumerate(itertools.product(*map(range, mesh.shape))):
        groups.setdefault(tuple(coordinate[axis] for axis in others), []).append(member)
    return list(groups.values())


class ProcessGroups:
    """The DeviceMesh of a plan's mesh and the names of the groups over sets of its axes.

    meshes: one per rank group, of which `mesh` is that of this rank's `group`; equal: whether they have one shape.
    """

    group = 0
    equal = True

    def __init__(self, mesh: Mesh, device_type: str) -> None:
        """Raises PlanMismatchError where the mesh does not have one device per running process."""
        if mesh.size != world_size():
            raise PlanMismatchError(
                f"the plan is for a mesh of {mesh.size} devices {dict(zip(mesh.axis_names, mesh.shape, strict=True))}, "
                f"{world_size()} processes are running: start {mesh.size} (torchrun --nproc-per-node), or plan again"
            )
        self.mesh = mesh
        self.meshes: tuple[Mesh, ...] = (mesh,)
        self.device_mesh = _device_mesh(mesh, device_type)
        self.device = _device(device_type)
        self._names: dict[str, str] = {}
        if device_type == "cpu":
            keep_freed_memory()

    @property
    def is_alone(self) -> bool:
        """Whether this process has no others beside it."""
        return sum(mesh.size for mesh in self.meshes) == 1

    def members(self, group: int) -> tuple[int, ...]:
        """The ranks of a rank group."""
        return tuple(range(self.meshes[group].size))

    @property
    def place(self) -> int:
        """This rank's position among the ranks of `mesh`, row-major."""
        return rank() - self.members(self.group)[0]

    @property
    def coordinate(self) -> tuple[int, ...]:
        """This rank's coordinate on `mesh`."""
        return self.mesh.coordinate(self.place)

    def name(self, symbol: str) -> str:
        """Name of the process group over the axes of `symbol` ("a" or "a+b"); the first call creates it."""
        if symbol not in self._names:
            self._names[symbol] = self._create(symbol)
        return self._names[symbol]

    def create(self, symbols: Iterable[str]) -> None:
        """Create the groups of all `symbols` in sorted order, the same on every rank."""
        for symbol in sorted(set(symbols)):
            self.name(symbol)

    def _create(self, symbol: str) -> str:
        names = symbol.split("+")
        assert set(names) <= set(self.mesh.axis_names), f"{symbol!r} names no axes of {self.mesh}"
        if len(names) == 1:
            return str(self.device_mesh.get_group(names[0]).group_name)
        axes = tuple(self.mesh.axis_names.index(name) for name in names)
        mine = dist.group.WORLD  # of all ranks there is a group already: another one is another communicator
        of_all = subgroups(self.mesh, axes)
        for ranks in of_all if len(of_all) > 1 else ():
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                mine = group
        assert mine is not None
        return str(mine.group_name)


class StageProcesses(ProcessGroups):
    """The processes of a plan with stages: one mesh per rank group, of which `mesh` and `device_mesh` are this rank's.

    All ranks create the process groups of all rank groups, in the same order.
    """

    def __init__(self, plan: Plan, device_type: str) -> None:
        """Raises PlanMismatchError where the plan does not have one device per running process."""
        if plan.num_ranks != world_size():
            raise PlanMismatchError(
                f"the plan is for {plan.num_ranks} devices, {world_size()} processes are running: start "
                f"{plan.num_ranks} (torchrun --nproc-per-node), or plan again"
            )
        names = plan.layout_mesh.axis_names
        self.rank_groups = plan.rank_groups
        self.meshes = tuple(Mesh(names, group.shape) for group in self.rank_groups)
        self.group = next(i for i, g in enumerate(self.rank_groups) if 0 <= rank() - g.first_rank < g.size)
        self.mesh = self.meshes[self.group]
        self.equal = len({mesh.shape for mesh in self.meshes}) == 1
        self.device = _device(device_type)
        self.device_mesh = [
            DeviceMesh(device_type, torch.tensor(self.members(i)).reshape(mesh.shape), mesh_dim_names=names)
            for i, mesh in enumerate(self.meshes)
        ][self.group]
        self._names = {}
        if device_type == "cpu":
            keep_freed_memory()

    def members(self, group: int) -> tuple[int, ...]:
        """The ranks of a rank group."""
        first = self.rank_groups[group].first_rank
        return tuple(range(first, first + self.rank_groups[group].size))

    def _create(self, symbol: str) -> str:
        names, found = symbol.split("+"), ""
        axes = tuple(self.mesh.axis_names.index(name) for name in names)
        for index, mesh in enumerate(self.meshes):
            members = self.members(index)
            for places in subgroups(mesh, axes):
                ranks = [members[place] for place in places]
                group = dist.new_group(ranks)
                if rank() in ranks:
                    found = str(group.group_name)
        return found


def _device(device_type: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)


def _device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    if not dist.is_initialized():
        return lone_device_mesh(device_type, mesh.axis_names)
    return init_device_mesh(device_type, mesh.shape, mesh_dim_names=mesh.axis_names)


def processes_of(plan: Plan, device_type: str) -> ProcessGroups:
    """The running processes as a plan has them; all ranks call it. Raises PlanMismatchError where they are others."""
    return StageProcesses(plan, device_type) if plan.in_stages else ProcessGroups(plan.mesh, device_type)
