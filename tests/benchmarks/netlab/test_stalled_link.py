"""A link that stalls in mid-training ends every rank with an error that names the operator and the late rank."""

from __future__ import annotations

import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.netlab.lab import Lab
from benchmarks.netlab.machine import why_unavailable
from benchmarks.netlab.presets import Network

REASON = why_unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

NODES, STALLED, TIMEOUT_SECONDS, END_SECONDS = 3, 2, 5.0, 60.0
TRAINING = f"""
import datetime, os, pathlib, sys
import torch, torch.distributed as dist
from torch import nn
import autopar

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(64, 64)
    def forward(self, x):
        return self.body(x).pow(2).mean()

folder, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds={TIMEOUT_SECONDS}))
torch.manual_seed(0)
x = torch.randn(12, 64)
module = autopar.compile(Model(), x, cluster="{NODES}x1 cpu @ 0.1Gb", dims={{"dp_replicate": {NODES}}})
try:
    while True:
        module(x).backward()
        (folder / f"training{{rank}}").touch()
except autopar.RankLostError as error:
    (folder / f"error{{rank}}").write_text(str(error))
    os._exit(0)
"""


@pytest.mark.exhaustive
def test_a_stalled_link_is_named_with_the_operator_on_every_rank(tmp_path: Path) -> None:
    network = Network(nodes=NODES, ranks_per_node=1, mbit=100.0, latency_us=200.0, cores_per_rank=None)
    with Lab(network) as lab, ThreadPoolExecutor(1) as pool:
        ended = pool.submit(lab.run, [sys.executable, "-c", TRAINING, str(tmp_path)], seconds=240.0, quiet=True)
        while len(list(tmp_path.glob("training*"))) < NODES and not ended.done():
            time.sleep(0.05)
        lab.stall(STALLED)
        ended.result(END_SECONDS)
    for rank in set(range(NODES)) - {STALLED}:
        told = (tmp_path / f"error{rank}").read_text()
        assert told.startswith(f"rank {STALLED} is late or its link stalls: "), told
        # it may stall in any exchange of a step: a meeting of the ranks, the mean of the loss, the gradients of `body`
        where = r"(/mean#0|body|train call \d+ of Model|the backward pass of train call \d+ of Model)"
        assert re.search(rf" of {where}\S* .*over ranks 0, 1, 2 does not end on rank {rank}", told), told
    cut_off = (tmp_path / f"error{STALLED}").read_text()
    assert f"does not end on rank {STALLED}" in cut_off, cut_off
