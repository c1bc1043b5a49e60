"""Jobs of the workers that read weights from files and write them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import transformers
from torch import nn

import autopar
from autopar.layouts.index_blocks import Block, block_of
from autopar.layouts.placement import Layout, Mesh
from autopar.plans.parallel_plan import Plan
from autopar.runtime.parameters import full_tensor, local_tensor
from autopar.runtime.weights import shard_model, written_weights
from autopar.runtime.weights.block_reader import BlockReader
from tests.distributed.captured_once import capture_once, compile_once, prepared_by
from tests.distributed.pipeline_jobs import captured as captured_case
from tests.distributed.pipeline_jobs import gathered
from tests.distributed.pipeline_models import CASES
from tests.distributed.weight_jobs import BATCH, Fused, captured_fused

WORDS, WIDTH = 67, 256


def llama(seed: int | None) -> nn.Module:
    """One layer, with tied embeddings of an odd number of words; on meta without a seed."""
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=WIDTH, intermediate_size=WIDTH, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=WORDS, max_position_embeddings=32, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(seed or 0)
    with torch.device("meta" if seed is None else "cpu"):
        return transformers.LlamaForCausalLM(config)


def words() -> dict[str, torch.Tensor]:
    """(8, 6), the same everywhere."""
    drawn = torch.randint(0, WORDS, (8, 6), generator=torch.Generator().manual_seed(1))
    return {"input_ids": drawn, "labels": drawn}


def captured_llama(**_: Any) -> bool:
    """Capture the model."""
    return capture_once("llama of files", llama(0), words())


def _error(module: nn.Module, reference: nn.Module) -> float:
    """Of parameters and of all buffers, by their first names."""
    mine = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    plain = {**dict(reference.named_parameters()), **dict(reference.named_buffers())}
    return max(float((full_tensor(mine[n].detach()) - value.detach()).abs().max()) for n, value in plain.items())


@contextmanager
def _counted() -> Iterator[list[int]]:
    """The bytes that readers have read, when they are done."""
    counts: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockReader, "__exit__", lambda reader, *_: counts.append(reader.bytes_read))
        yield counts


def _of_rank_0(shape: tuple[int, ...], layout: Layout, mesh: Mesh, _place: int) -> Block:
    return block_of(shape, layout, mesh, 0)


@prepared_by(captured_llama)
def of_files(dims: dict[str, int], first: str, second: str, out: str, planted: bool = False) -> dict[str, Any]:
    """A model on meta with the weights of the first folder, written to `out`, then with those of the second.

    planted: the mutation by which every rank reads the block of rank 0."""
    with pytest.MonkeyPatch.context() as patch, _counted() as counts:
        if planted:
            patch.setattr(shard_model, "block_of", _of_rank_0)
        module = compile_once("llama of files", llama(None), words(), dims=dims, weights=first)
    reference = llama(1)
    blocks = [local_tensor(parameter) for parameter in module.parameters()]
    found = {
        "error": _error(module, reference),
        "loss": abs(float(module(**words()).loss) - float(reference(**words()).loss)),
        "read": sum(counts),
        "blocks": sum(block.numel() * block.element_size() for block in blocks),
        "tied": module.get_parameter("lm_head.weight") is module.get_parameter("model.embed_tokens.weight"),
    }
    if planted:
        return found
    module.save_pretrained(out, max_shard_size=300_000)
    if dist.get_rank() == 0:
        back = transformers.AutoModelForCausalLM.from_pretrained(out)
        found |= {"back": _error(back, reference), "files": len(list(Path(out).glob("*.safetensors")))}
    module.load_weights(second)
    return {**found, "second": _error(module, llama(2))}


@prepared_by(captured_fused)
def strided_of_files(folder: str) -> tuple[float, bool]:
    """The same with strided blocks and a buffer, of a model that has other values; whether any block is strided."""
    module = compile_once("fused", Fused(), BATCH, dims={"tp": 2}, weights=folder)
    torch.manual_seed(0)
    reference = Fused()
    module.load_weights(folder)
    return _error(module, reference), any("split" in str(layout) for layout in module.plan.placements.values())


@prepared_by(captured_case)
def stages_of_files(name: str, plan: bytes, folder: str, out: str) -> dict[str, Any]:
    """The same where every rank keeps the parameters of its stage only."""
    case = CASES[name]
    plain = dict(case.model().named_parameters())
    with torch.device("meta"):
        model = case.model()
    with _counted() as counts:
        module = compile_once(name, model, case.batch(0), plan=Plan.from_json(plan), weights=folder)
    weights = gathered(module, gradients=False)
    module.save_weights(out, max_shard_size=5_000)
    files = [safetensors.torch.load_file(file) for file in Path(out).glob("*.safetensors")]
    written = {key: value for file in files for key, value in file.items()}
    module.load_weights(out)
    return {
        "error": max(float((weights[n] - plain[n].detach()).abs().max()) for n in plain if n in weights),
        "written": max(float((written[n] - plain[n].detach()).abs().max()) for n in plain),
        "extra": len(written) - len(plain),
        "share": sum(counts) / sum(value.numel() * 4 for value in plain.values()),
        "again": max(float((value - plain[n].detach()).abs().max()) for n, value in gathered(module, False).items()),
    }


@prepared_by(captured_fused)
def refused(good: str, folders: list[str], out: str) -> list[str]:
    """What each rank says where its folder is one of `folders`, and where rank 0 cannot write."""
    module = compile_once("fused", Fused(), BATCH, dims={"dp_shard": 2}, weights=good)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(written_weights, "open_to_append", _full_disk)
        acts = [
            partial(compile_once, "fused", Fused(), BATCH, dims={"tp": 2}, weights=folders[dist.get_rank()]),
            partial(module.load_weights, folders[dist.get_rank()]),
            partial(module.save_weights, out),
            partial(module.save_weights, f"{good}/model.safetensors"),
        ]
        return [_said(act) for act in acts]


def _full_disk(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


def _said(act: Any) -> str:
    try:
        act()
    except autopar.AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
