"""The stages, most valuable first. On one device their limits add up to no more than `ALL_SECONDS`."""

from __future__ import annotations

from benchmarks.gpu import kernels, steps, symbols
from benchmarks.gpu.stage import Stage

STAGE_SECONDS, ALL_SECONDS = 480.0, 1200.0
"""The longest that a stage may take, and all stages of one device."""


def _steps(model: str, what: str, seconds: float) -> Stage:
    return Stage(
        name=f"steps-{model}",
        what=f"{what}: predicted beside measured, against torch.compile and eager",
        seconds=seconds,
        run=steps.run,
        full={"model": model, "steps": 20, "backend": "inductor"},
        tiny={"model": model, "steps": 2, "backend": "aot_eager"},
    )


STAGES: tuple[Stage, ...] = (
    Stage(
        name="symbols",
        what="private symbols of torch, and what they do on this device",
        seconds=60,
        run=symbols.run,
        full={"width": 256},
        tiny={"width": 16},
    ),
    Stage(
        name="kernels",
        what="our kernels against their references and the memory rate",
        seconds=90,
        run=kernels.run,
        full={
            "sizes": [(8192, 4096), (16384, 2048), (16384, 768)], "vocabulary": (8192, 50257), "copied_bytes": 1 << 30,
        },
        tiny={"sizes": [(16, 32)], "vocabulary": (16, 96), "copied_bytes": 1 << 16},
    ),
    _steps("gpt2", "steps of GPT-2", 150),
    _steps("llama-1b", "steps of a Llama of 1.5 billion parameters", 180),
    _steps("vit-l", "steps of ViT-L", 90),
    _steps("mixture", "steps of a mixture of 16 experts", 110),
    _steps("unet", "steps of a U-Net", 80),
)  # fmt: skip
