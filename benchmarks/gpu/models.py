"""The models whose steps are measured: plain torch, at their real sizes and at tiny ones.

    made = MODELS["gpt2"].made(torch.device("cuda"), tiny=False)
    made.model(**made.inputs)                       # the loss; the same weights and batch at every call of `made`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.plan_quality.models import gpt, llama, mixture, vit
from benchmarks.plan_quality.settings import Inputs, masks, pictures, tokens
from benchmarks.vision import UNet

SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A module in training mode and one batch, on one device."""

    model: nn.Module
    inputs: Inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Arguments of the model's factory, and of what makes its batch."""

    model: Mapping[str, Any]
    batch: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A model, its batch as a function of numbers, and both kinds of sizes."""

    build: Callable[..., nn.Module]
    batch: Callable[..., Callable[[], Inputs]]
    full: Sizes
    tiny: Sizes

    def made(self, device: torch.device | str, *, tiny: bool) -> Made:
        """The same values at every call on one device; none on "meta"."""
        sizes = self.tiny if tiny else self.full
        torch.manual_seed(SEED)
        with torch.device(device):
            model = self.build(**sizes.model).train()
            inputs: dict[str, Tensor] = self.batch(*sizes.batch)()
        return Made(model=model, inputs=inputs)


LLAMA_1B = {"layers": 16, "width": 2048, "hidden": 8192, "heads": 32, "kv_heads": 8, "vocabulary": 128256}
TINY_LLAMA = {"layers": 2, "width": 32, "hidden": 64, "heads": 4, "kv_heads": 2, "vocabulary": 96}
MODELS: Mapping[str, Measured] = {
    "gpt2": Measured(
        build=gpt,
        batch=tokens,
        full=Sizes(
            model={"layers": 12, "width": 768, "heads": 12, "vocabulary": 50257, "positions": 1024},
            batch=(16, 1024, 50257),
        ),
        tiny=Sizes(
            model={"layers": 2, "width": 32, "heads": 2, "vocabulary": 96, "positions": 16}, batch=(4, 16, 96)
        ),
    ),
    "llama-1b": Measured(
        build=llama,
        batch=tokens,
        full=Sizes(
            model=LLAMA_1B,
            batch=(4, 2048, 128256),
        ),
        tiny=Sizes(
            model=TINY_LLAMA,
            batch=(4, 16, 96),
        ),
    ),
    "llama-1b-long": Measured(
        build=llama,
        batch=tokens,
        full=Sizes(
            model=LLAMA_1B,
            batch=(1, 65536, 128256),
        ),
        tiny=Sizes(
            model=TINY_LLAMA,
            batch=(1, 64, 96),
        ),
    ),
    "vit-l": Measured(
        build=vit,
        batch=pictures,
        full=Sizes(
            model={"layers": 24, "width": 1024, "heads": 16, "size": 224, "patch": 16, "classes": 1000},
            batch=(64, 224, 1000),
        ),
        tiny=Sizes(
            model={"layers": 2, "width": 32, "heads": 2, "size": 16, "patch": 4, "classes": 8}, batch=(4, 16, 8)
        ),
    ),
    "mixture": Measured(
        build=mixture,
        batch=tokens,
        full=Sizes(
            model={"layers": 8, "width": 1024, "hidden": 1024, "heads": 16, "experts": 16, "chosen": 2,
                   "vocabulary": 32000},
            batch=(8, 1024, 32000),
        ),
        tiny=Sizes(
            model={"layers": 1, "width": 32, "hidden": 32, "heads": 2, "experts": 4, "chosen": 2, "vocabulary": 96},
            batch=(4, 16, 96),
        ),
    ),
    "unet": Measured(
        build=UNet,
        batch=masks,
        full=Sizes(model={"channels": (64, 128, 256, 512, 1024), "classes": 21}, batch=(16, 256, 21)),
        tiny=Sizes(model={"channels": (32, 64), "classes": 4}, batch=(2, 16, 4)),
    ),
}  # fmt: skip
"""By name. Llama-1B is Llama 3.2 1B with a head of its own, GPT-2 the same; the long one has a sequence that fits only
where much is computed again and where the logits never exist whole."""
