"""Initial weights: every rank trains those of rank 0, as DistributedDataParallel does.

    rank 0 seeded 0, rank 1 seeded 1     ->  rank 1 receives the blocks that it keeps, and a warning says so
    both seeded alike                    ->  digests agree, nothing is sent

Ranks compare one number per parameter and buffer (`guards/digests.py`); only tensors that differ from rank 0's are
sent, each rank the block that it stores, so a tensor that is stored split crosses the network once in all.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import RankMismatchError
from autopar.layouts.placement import Layout, Mesh, Replicate, replicated
from autopar.plans.plan_text import format_bytes
from autopar.runtime.consensus import gather_from_all
from autopar.runtime.guards.digests import digests_of, has_digest
from autopar.runtime.parameters import local_block
from autopar.runtime.process_groups import ProcessGroups, rank, world_size

log = logging.getLogger(__name__)

Sync: TypeAlias = Literal["broadcast", "check"]
"""What happens to weights that differ between ranks: those of rank 0 are taken, or an error says so."""

_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBlock:
    """The part of a tensor that a rank keeps."""

    layout: Layout
    mesh: Mesh
    place: int

    @property
    def is_whole(self) -> bool:
        """Whether the rank keeps all of it."""
        return all(isinstance(placement, Replicate) for placement in self.layout)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This block of a full tensor."""
        return local_block(tensor, self.layout, self.mesh, self.place)


def agree_on_weights(
    model: nn.Module,
    layouts: Mapping[str, Layout],
    absent: Collection[str],
    groups: ProcessGroups,
    sync: Sync,
    given: Collection[str] = (),
) -> None:
    """Give every rank the weights of rank 0 where they differ, in place, as far as the rank keeps them.

    model: of full plain tensors; those on meta, and DTensors, are left out. layouts: of stored parameters and buffers
    by name; others are whole on every rank. absent: parameters that this rank does not keep. given: names whose values
    come from files, which are not compared.
    Raises RankMismatchError for sync="check", naming the ranks and tensors that differ from rank 0's.
    """
    if world_size() == 1:
        return
    tensors = {name: tensor for name, tensor in _plain_tensors(model).items() if name not in given}
    digests = gather_from_all(dict(zip(tensors, digests_of(list(tensors.values())), strict=True)))
    names = [name for name in tensors if any(other.get(name) != digests[0].get(name) for other in digests)]
    if not names:
        return
    text = _differences(digests, names, len(tensors))
    if sync == "check":
        raise RankMismatchError(
            f"{text}: build the model from the same seed or file on every rank (torch.manual_seed), or pass "
            'sync="broadcast" to train from those of rank 0'
        )
    mine = {
        name: KeptBlock(
            layout=layouts.get(name, replicated(len(groups.mesh.shape))), mesh=groups.mesh, place=groups.place
        )
        for name in names
        if digests[rank()].get(name) != digests[0][name] and name not in absent
    }
    wanted = gather_from_all(mine)
    sent = sum(_pass_on(tensors[name], name, wanted, groups.device) for name in names)
    if rank() == 0:
        log.warning(f"{text}: those of rank 0 were sent to the others ({format_bytes(sent)}); seed all ranks alike")


def _plain_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers with values, by their first name. Subclasses of tensors, whose bits are their own affair,
    stay as each rank has them."""
    both = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor for name, tensor in both if has_digest(tensor)}


def _differences(digests: Sequence[Mapping[str, int]], names: Sequence[str], count: int) -> str:
    strange = [
        member for member, found in enumerate(digests) if any(found.get(name) != digests[0][name] for name in names)
    ]
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    ranks = f"ranks {', '.join(map(str, strange))}" if len(strange) > 1 else f"rank {strange[0]}"
    return f"initial weights differ: {len(names)} of {count} tensors of {ranks} are not those of rank 0 ({shown})"


def _pass_on(tensor: torch.Tensor, name: str, wanted: Sequence[Mapping[str, KeptBlock]], device: torch.device) -> int:
    """Send one tensor of rank 0 to all that want it, each its block; returns the bytes that rank 0 sent."""
    takers = {member: blocks[name] for member, blocks in enumerate(wanted) if name in blocks}
    size = tensor.numel() * tensor.element_size()
    with torch.no_grad():
        if len(takers) > 1 and all(block.is_whole for block in takers.values()):
            whole = tensor.to(device, copy=True).contiguous()
            dist.broadcast(whole, 0)
            if rank() in takers:
                tensor.copy_(whole)
            return size
        sent = 0
        for member, block in takers.items():
            if rank() == 0:
                part = block.of(tensor).contiguous().to(device)
                dist.send(part, member)
                sent += part.numel() * part.element_size()
            elif rank() == member:
                _receive(tensor, block, device)
    return sent


def _receive(tensor: torch.Tensor, block: KeptBlock, device: torch.device) -> None:
    """Rank 0's values for this rank's block of the full tensor; the rest of it stays."""
    part = block.of(tensor)
    values = torch.empty(part.shape, dtype=tensor.dtype, device=device)
    dist.recv(values, 0)
    if part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
        part.copy_(values)
        return
    places = block.of(torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)).reshape(-1)
    tensor[torch.unravel_index(places, tensor.shape)] = values.to(tensor.device).reshape(-1)
