"""The stages, most valuable first. On one device their limits add up to no more than `ALL_SECONDS`."""

from __future__ import annotations

from benchmarks.gpu import (
    allocator,
    attention,
    collectives,
    kernels,
    operators,
    parallel,
    profile,
    steps,
    symbols,
    symmetric,
)
from benchmarks.gpu.stage import Stage

STAGE_SECONDS, ALL_SECONDS = 480.0, 1200.0
"""The longest that a stage may take, and all stages of one device."""


def _steps(model: str, what: str, seconds: float, repeats: int = 20, graphs: bool = True) -> Stage:
    return Stage(
        name=f"steps-{model}",
        what=f"{what}: predicted beside measured, against torch.compile and eager",
        seconds=seconds,
        run=steps.run,
        full={"model": model, "steps": repeats, "backend": "inductor", "graphs": graphs},
        tiny={"model": model, "steps": 2, "backend": "aot_eager", "graphs": graphs},
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
        seconds=60,
        run=kernels.run,
        full={
            "sizes": [(8192, 4096), (16384, 2048), (16384, 768)], "vocabulary": (8192, 50257),
            "loss": (16384, 50257, 768), "grouped": (16384, 16, 2048, 1408), "attention": (2, 16, 1024, 64),
            "copied_bytes": 1 << 30,
        },
        tiny={
            "sizes": [(16, 32)], "vocabulary": (16, 96), "loss": (4200, 40, 8), "grouped": (64, 4, 16, 24),
            "attention": (1, 2, 16, 8), "copied_bytes": 1 << 16,
        },
    ),
    _steps("gpt2", "steps of GPT-2", 100),
    _steps("llama-1b", "steps of a Llama of 1.5 billion parameters", 130),
    Stage(
        name="attention",
        what="our attention against torch's own kernels",
        seconds=60,
        run=attention.run,
        full={
            "shapes": [
                (16, 12, 12, 1024, 64, True, 0.0), (4, 32, 8, 2048, 64, True, 0.0), (2, 32, 8, 4096, 128, True, 0.0),
                (64, 16, 16, 196, 64, False, 0.0), (1, 16, 16, 16384, 128, True, 0.0),
                (16, 12, 12, 1024, 64, True, 0.1),
            ],
        },
        tiny={"shapes": [(1, 4, 4, 32, 16, True, 0.0), (1, 4, 2, 32, 16, False, 0.0), (1, 4, 4, 32, 16, True, 0.1)]},
    ),
    Stage(
        name="allocator",
        what="what of the memory a program can use",
        seconds=30,
        run=allocator.run,
        full={
            "sizes": [1, 1000, (1 << 20) + 1, 10 * 2**20 + 1, 100 * 2**20 + 1], "product": 4096, "batches": 50,
            "largest": 1 << 30, "filled_bytes": None,
        },
        tiny={"sizes": [1, 1000], "product": 16, "batches": 3, "largest": 1 << 16, "filled_bytes": 1 << 16},
    ),
    Stage(
        name="operators",
        what="products in bf16 and float8: forward, dgrad, wgrad",
        seconds=30,
        run=operators.run,
        full={"layers": [(8192, 2048, 8192), (16384, 4096, 4096), (8192, 8192, 2048), (16384, 768, 3072)]},
        tiny={"layers": [(32, 48, 16)]},
    ),
    Stage(
        name="profile",
        what="autopar profile, and the preset of it",
        seconds=200,
        run=profile.run,
        full={"seconds": 150.0, "sizes": {}, "dtypes": ["bfloat16", "float32"]},
        tiny={
            "seconds": 10.0,
            "sizes": {
                "hidden": [8], "rows": [4], "sequences": [16], "memory_rows": [4], "memory_widths": [8],
                "attention_tokens": 16,
            },
            "dtypes": ["float32"],
        },
    ),
    _steps("llama-1b-long", "steps of that Llama on one sequence of 65,536", 130, repeats=3, graphs=False),
    _steps("vit-l", "steps of ViT-L", 150),
    _steps("mixture", "steps of a mixture of 16 experts", 110),
    _steps("unet", "steps of a U-Net", 100),
    Stage(
        name="collectives",
        what="collectives over all devices, predicted beside measured",
        seconds=120,
        run=collectives.run,
        full={"sizes": [1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28], "rehearsed_ranks": 0},
        tiny={"sizes": [1 << 10], "rehearsed_ranks": 2},
        num_devices=2,
    ),
    Stage(
        name="symmetric",
        what="products beside their collective: whole, in chunks, in symmetric memory",
        seconds=120,
        run=symmetric.run,
        full={"sizes": [(16384, 4096, 3584), (16384, 8192, 2048), (4096, 4096, 1024)], "rehearsed_ranks": 0},
        tiny={"sizes": [(32, 16, 8)], "rehearsed_ranks": 2},
        num_devices=2,
    ),
    Stage(
        name="parallel",
        what="DDP, FSDP2 and tensor parallelism: ours against torch's",
        seconds=300,
        run=parallel.run,
        full={"ways": ["ddp", "fsdp2", "tp"], "steps": 20, "rehearsed_ranks": 0},
        tiny={"ways": ["ddp", "fsdp2", "tp"], "steps": 2, "rehearsed_ranks": 2},
        num_devices=2,
    ),
)  # fmt: skip
