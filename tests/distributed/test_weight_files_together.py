"""Every rank reads its blocks of safetensors files, and all of them write such files together."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.distributed.pipeline_models import CASES
from tests.distributed.pipeline_plans import pipeline_plan
from tests.distributed.pool import Pool
from tests.distributed.weight_file_jobs import llama
from tests.distributed.weight_jobs import Fused

pytestmark = pytest.mark.distributed

JOBS = "tests.distributed.weight_file_jobs"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Of a model with two sets of weights, the first in several files."""
    first, second = (tmp_path_factory.mktemp(name) for name in ("first", "second"))
    llama(1).save_pretrained(first, max_shard_size="500KB")
    llama(2).save_pretrained(second)
    return str(first), str(second)


def fused(folder: Path) -> Path:
    """The weights of a model with strided blocks."""
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(Fused().state_dict(), folder / "model.safetensors")
    return folder


@pytest.mark.exhaustive(sample="{'tp': 2}")
@pytest.mark.parametrize("dims", [{"dp_replicate": 2}, {"dp_shard": 2}, {"tp": 2}], ids=str)
def test_a_model_on_meta_has_the_weights_of_the_files(
    pool: Pool, folders: tuple[str, str], dims: dict[str, int], tmp_path: Path
) -> None:
    first, second = folders
    out = str(tmp_path / "out")
    found = pool.run(f"{JOBS}:of_files", world_size=2, dims=dims, first=first, second=second, out=out)
    for rank in found:
        assert rank["error"] == rank["second"] == 0.0
        assert rank["loss"] < 1e-5
        assert rank["read"] == rank["blocks"], "bytes of the blocks and no others"
        assert rank["tied"]
    assert found[0]["back"] == 0.0
    assert found[0]["files"] > 3


def test_blocks_of_another_rank_are_noticed(pool: Pool, folders: tuple[str, str]) -> None:
    """The mutation: rank 1 reads what rank 0 keeps."""
    found = pool.run(
        f"{JOBS}:of_files", world_size=2, dims={"dp_shard": 2}, first=folders[0], second="", out="", planted=True
    )
    assert max(rank["error"] for rank in found) > 0.01


def test_strided_blocks_and_buffers_come_from_files(pool: Pool, tmp_path: Path) -> None:
    for error, strided in pool.run(f"{JOBS}:strided_of_files", world_size=2, folder=str(fused(tmp_path / "fused"))):
        assert strided
        assert error == 0.0


@pytest.mark.slow
def test_a_stage_reads_and_writes_its_own_weights(pool: Pool, tmp_path: Path) -> None:
    plan = pipeline_plan("skips", CASES["skips"].halves, "1f1b", 2, {"dp_shard": 2}).to_json()
    state = {name: parameter.detach() for name, parameter in CASES["skips"].model().named_parameters()}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    folders = {"folder": str(tmp_path), "out": str(tmp_path / "out")}
    found = pool.run(f"{JOBS}:stages_of_files", name="skips", plan=plan, **folders)
    for rank in found:
        assert rank["error"] == rank["written"] == rank["again"] == 0.0
        assert rank["extra"] == 0
        assert rank["share"] < 0.6, "its own layers, in two parts"


def test_what_one_rank_cannot_read_or_write_is_an_error_on_all(pool: Pool, tmp_path: Path) -> None:
    good, cut, other = (fused(tmp_path / name) for name in ("good", "cut", "other"))
    file = cut / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    fewer = {name: tensor for name, tensor in Fused().state_dict().items() if "bias" not in name}
    safetensors.torch.save_file({**fewer, **Fused().state_dict()}, other / "model.safetensors", {"another": "header"})
    out = str(tmp_path / "out")

    def run(first: Path, second: Path) -> list[list[str]]:
        given = [str(first), str(second)]
        return pool.run(f"{JOBS}:refused", world_size=2, good=str(good), folders=given, out=out)

    for compiled, loaded, written, no_folder in run(cut, cut):
        assert compiled.startswith("ConfigurationError: ")
        assert "it was cut off" in compiled
        assert str(cut) in compiled
        assert loaded == compiled
        assert written.startswith("ConfigurationError: cannot write weights to"), written
        assert "No space left" in written
        assert "it is a file; name a folder" in no_folder
    first, second = run(good, cut)
    assert first[0].startswith("RankMismatchError: rank 1 failed where rank 0 did not: ConfigurationError: ")
    assert second[0].startswith("ConfigurationError: ")
    for said in run(good, other):
        assert said[0].startswith("RankMismatchError: ranks 1 were given other weight files than rank 0")
