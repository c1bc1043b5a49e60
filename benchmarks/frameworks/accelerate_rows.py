"""Rows of Accelerate: one loop with its options, and what is done around it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator as PlainAccelerator
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader

from autopar.integrations.accelerate import Accelerator
from benchmarks.frameworks.framework_models import Points, Stream, Texts, bert, gpt2, scorer
from benchmarks.frameworks.framework_row import Run, Stand, row

STEPS = 50
Optimizer = Callable[[Any], torch.optim.Optimizer]
SGD: Optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def accelerator_of(stand: Stand, autopar: Any = None, **settings: Any) -> Any:
    """Accelerate's, or autopar's, with the same settings."""
    if stand.ours:
        return Accelerator(cpu=True, autopar=autopar or {}, **settings)
    return PlainAccelerator(cpu=True, **settings)


def trained(
    stand: Stand,
    *,
    model: Callable[[], Any] = gpt2,
    data: Any = None,
    optimizer: Optimizer = SGD,
    clip: float | None = None,
    clip_value: float | None = None,
    schedule: Callable[[Any], Any] | None = None,
    loader: dict[str, Any] | None = None,
    epochs: int = 1,
    batch: int | None = None,
    autopar: Any = None,
    **settings: Any,
) -> Run:
    """The usual loop over batches of `model(**batch).loss`. settings: of the Accelerator."""
    accelerator = accelerator_of(stand, autopar, **settings)
    net = model()
    optim = optimizer(p for p in net.parameters() if p.requires_grad)
    batches = DataLoader(data or Texts(8 * STEPS), batch_size=batch or stand.batch, **(loader or {}))
    net, optim, batches = accelerator.prepare(net, optim, batches)
    scheduler = accelerator.prepare(schedule(optim)) if schedule is not None else None
    losses = []
    for _ in range(epochs):
        for each in batches:
            with accelerator.accumulate(net):
                loss = net(**each).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip is not None:
                    accelerator.clip_grad_norm_(net.parameters(), clip)
                if accelerator.sync_gradients and clip_value is not None:
                    accelerator.clip_grad_value_(net.parameters(), clip_value)
                optim.step()
                if scheduler is not None:
                    scheduler.step()
                optim.zero_grad()
            losses.append(loss.item())
    return Run(losses=losses, weights=accelerator.get_state_dict(net))


def loss_outside(stand: Stand, **settings: Any) -> Run:
    """The model returns scores, the loop computes the loss."""
    accelerator = accelerator_of(stand, **settings)
    net = scorer()
    optim = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net, optim, batches = accelerator.prepare(net, optim, DataLoader(Points(8 * STEPS), batch_size=stand.batch))
    losses = []
    for x, y in batches:
        loss = torch.nn.functional.cross_entropy(net(x), y)
        accelerator.backward(loss)
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return Run(losses=losses, weights=accelerator.get_state_dict(net))


def evaluated(stand: Stand, *, before: bool = False) -> Run:
    """Accuracy and loss over a set whose last batch is short, before or behind training."""
    accelerator = accelerator_of(stand)
    net = bert()
    optim = SGD(net.parameters())
    data, held = Texts(160, classes=True), Texts(30, classes=True, seed=5)
    net, optim, batches, held_out = accelerator.prepare(
        net, optim, DataLoader(data, batch_size=stand.batch), DataLoader(held, batch_size=stand.batch)
    )
    losses = [] if before else _steps(accelerator, net, optim, batches)
    net.eval()
    right, seen, total = 0, 0, 0.0
    for each in held_out:
        with torch.no_grad():
            out = net(**each)
        scores, labels = accelerator.gather_for_metrics((out.logits, each["labels"]))
        right, seen = right + int((scores.argmax(-1) == labels).sum()), seen + len(labels)
        total += float(out.loss) * len(labels)
    net.train()
    losses += _steps(accelerator, net, optim, batches) if before else []
    metrics = {"accuracy": right / seen, "seen": float(seen), "loss": total / seen}
    return Run(losses=losses, weights=accelerator.get_state_dict(net), metrics=metrics)


def _steps(accelerator: Any, net: Any, optim: Any, batches: Any, most: int = STEPS) -> list[float]:
    losses: list[float] = []
    for each in batches:
        loss = net(**each).loss
        accelerator.backward(loss)
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
        if len(losses) == most:
            break
    return losses


def resumed(stand: Stand, *, naming: bool = False, autopar: Any = None) -> Run:
    """Half of the steps, save_state, new objects, load_state, the other half of the batches."""
    settings: dict[str, Any] = {}
    if naming:
        from accelerate.utils import ProjectConfiguration

        folder = str(stand.folder / "project")
        settings["project_config"] = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    accelerator = accelerator_of(stand, autopar, **settings)
    counted = _Count()
    net, optim, batches, plan = _prepared(accelerator, stand)
    accelerator.register_for_checkpointing(counted)
    losses = _steps(accelerator, net, optim, batches, STEPS // 2)
    plan.step()
    counted.steps = STEPS // 2
    accelerator.save_state(None if naming else str(stand.folder / "state"))
    accelerator.free_memory()
    net, optim, batches, plan = _prepared(accelerator, stand)
    counted.steps = 0
    accelerator.load_state(None if naming else str(stand.folder / "state"))
    rate = float(plan.get_last_lr()[0])
    losses += _steps(accelerator, net, optim, accelerator.skip_first_batches(batches, counted.steps))
    return Run(losses=losses, weights=accelerator.get_state_dict(net), metrics={"n": float(counted.steps), "lr": rate})


def _prepared(accelerator: Any, stand: Stand) -> Any:
    net = gpt2()
    optim = SGD(net.parameters())
    plan = torch.optim.lr_scheduler.ConstantLR(optim, factor=1.0)
    return accelerator.prepare(net, optim, DataLoader(Texts(8 * STEPS), batch_size=stand.batch), plan)


class _Count:
    """What a user registers for checkpoints."""

    steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def saved(stand: Stand, *, how: str) -> Run:
    """Weights written by `how` and read again by transformers, on one process."""
    accelerator = accelerator_of(stand)
    net, optim, batches, _ = _prepared(accelerator, stand)
    losses = _steps(accelerator, net, optim, batches)
    folder = str(stand.folder / "model")
    if how == "save_pretrained":
        accelerator.unwrap_model(net).save_pretrained(
            folder, is_main_process=accelerator.is_main_process, save_function=accelerator.save,
            state_dict=accelerator.get_state_dict(net),
        )  # fmt: skip
        accelerator.wait_for_everyone()
        from transformers import GPT2LMHeadModel

        weights = GPT2LMHeadModel.from_pretrained(folder).state_dict()
    else:
        accelerator.save_model(net, folder)
        accelerator.wait_for_everyone()
        from safetensors.torch import load_file

        weights = load_file(f"{folder}/model.safetensors")
    return Run(losses=losses, weights=dict(weights))


def without_sync(stand: Stand) -> Run:
    """`no_sync` by hand, three of four batches."""
    accelerator = accelerator_of(stand)
    net, optim, batches, _ = _prepared(accelerator, stand)
    losses = []
    for index, each in enumerate(batches):
        last = index % 4 == 3
        if last:
            loss = net(**each).loss
            accelerator.backward(loss)
            optim.step()
            optim.zero_grad()
        else:
            with accelerator.no_sync(net):
                loss = net(**each).loss
                accelerator.backward(loss)
        losses.append(loss.item())
    return Run(losses=losses, weights=accelerator.get_state_dict(net))


def two_optimizers(stand: Stand) -> Run:
    """One per half of the parameters."""
    accelerator = accelerator_of(stand)
    net = gpt2()
    weights = list(net.parameters())
    accelerator.prepare(net, SGD(weights[:3]), SGD(weights[3:]), DataLoader(Texts(16), batch_size=stand.batch))
    return Run()


def in_autocast(stand: Stand) -> Run:
    """The forward inside of `accelerator.autocast()`."""
    accelerator = accelerator_of(stand, mixed_precision="bf16")
    net, optim, batches, _ = _prepared(accelerator, stand)
    losses = []
    for each in batches:
        with accelerator.autocast():
            loss = net(**each).loss
        accelerator.backward(loss)
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return Run(losses=losses)


def gathered(stand: Stand) -> Run:
    """`gather` and `reduce` of what each process has of its own."""
    accelerator = accelerator_of(stand)
    own = torch.tensor([float(accelerator.process_index)])
    metrics = {
        "gathered": float(accelerator.gather(own).numel()) / accelerator.num_processes,
        "mean": float(accelerator.reduce(torch.tensor(3.0), "mean")),
    }
    return Run(metrics=metrics)


def frozen(base: Callable[[], Any] = gpt2) -> Any:
    """A model whose embeddings are frozen."""
    net = base()
    net.transformer.wte.weight.requires_grad_(False)
    return net


def recomputing() -> Any:
    """A model with gradient checkpointing."""
    net = gpt2()
    net.gradient_checkpointing_enable()
    return net


def in_groups(parameters: Any) -> torch.optim.Optimizer:
    """Two groups with rates of their own."""
    weights = list(parameters)
    wide, narrow = [w for w in weights if w.ndim > 1], [w for w in weights if w.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": wide}, {"params": narrow, "lr": 0.01}]
    return torch.optim.SGD(groups, lr=0.05, weight_decay=0.1)


def ordered(stand: Stand) -> Run:
    """A shuffle with a generator of the user's."""
    return trained(stand, loader={"shuffle": True, "generator": torch.Generator().manual_seed(4)})


def seedable(stand: Stand) -> Run:
    """Accelerate's own sampler that a seed decides."""
    torch.manual_seed(7)
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    return trained(stand, loader={"shuffle": True}, dataloader_config=config)


def split(stand: Stand) -> Run:
    """The loader's batch is the global one."""
    return trained(stand, batch=8, dataloader_config=DataLoaderConfiguration(split_batches=True))


def sharded(stand: Stand) -> Run:
    """An FSDP plugin beside autopar."""
    plugin = {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)} if stand.ours else {}
    return trained(stand, **plugin)


step_rate = partial(torch.optim.lr_scheduler.ConstantLR, factor=0.5, total_iters=10_000)
nesterov = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)

ROWS = (
    row("accelerate", "prepare and backward", trained),
    row("accelerate", "a classifier of transformers", partial(trained, model=bert, data=Texts(400, classes=True))),
    row("accelerate", "a scheduler", partial(trained, schedule=step_rate)),
    row("accelerate", "clip_grad_norm_", partial(trained, clip=0.2)),
    row("accelerate", "clip_grad_value_", partial(trained, clip_value=0.01)),
    row("accelerate", "accumulate", partial(trained, gradient_accumulation_steps=4)),
    row("accelerate", "accumulate and clip", partial(trained, gradient_accumulation_steps=2, clip=0.2)),
    row("accelerate", "no_sync by hand", without_sync),
    row("accelerate", "a short last batch", partial(trained, data=Texts(45), epochs=2)),
    row("accelerate", "drop_last", partial(trained, data=Texts(45), epochs=2, loader={"drop_last": True})),
    row("accelerate", "shuffle with a generator", ordered),
    row("accelerate", "use_seedable_sampler", seedable),
    row("accelerate", "split_batches", split),
    row("accelerate", "an iterable dataset", partial(trained, data=Stream(400))),
    row("accelerate", "workers in the loader", partial(trained, data=Texts(160), loader={"num_workers": 1})),
    row("accelerate", "gather_for_metrics", evaluated),
    row("accelerate", "evaluation before training", partial(evaluated, before=True)),
    row("accelerate", "save_state and load_state", resumed),
    row("accelerate", "automatic checkpoint naming", partial(resumed, naming=True)),
    row("accelerate", "save_pretrained", partial(saved, how="save_pretrained")),
    row("accelerate", "save_model", partial(saved, how="save_model")),
    row("accelerate", "mixed precision bf16", partial(trained, mixed_precision="bf16"), precision="bf16"),
    row("accelerate", "autocast", in_autocast, precision="bf16"),
    row("accelerate", "a loss outside of the model, AdamW", loss_outside, precision="fp64"),
    row("accelerate", "groups of parameters, weight decay", partial(trained, optimizer=in_groups)),
    row("accelerate", "Nesterov momentum", partial(trained, optimizer=nesterov)),
    row("accelerate", "frozen parameters", partial(trained, model=frozen)),
    row("accelerate", "gradient checkpointing", partial(trained, model=recomputing)),
    row("accelerate", "gather and reduce of own values", gathered),
    row("accelerate", "tensor parallelism", partial(trained, clip=0.2, autopar={"dims": {"tp": 2}}),
        change='Accelerator(autopar={"dims": {"tp": 2}})'),
    row("accelerate", "sharded parameters", partial(trained, clip=0.2, autopar={"dims": {"dp_shard": 2}}),
        change='Accelerator(autopar={"dims": {"dp_shard": 2}})'),
    row("accelerate", "two stages", partial(trained, clip=0.2, autopar={"dims": {"pp": 2}}),
        change='Accelerator(autopar={"dims": {"pp": 2}})'),
    row("accelerate", "resuming sharded parameters", partial(resumed, autopar={"dims": {"dp_shard": 2}}),
        change='Accelerator(autopar={"dims": {"dp_shard": 2}})'),
    row("accelerate", "mixed precision fp16", partial(trained, mixed_precision="fp16"), refused="fp32 or bf16"),
    row("accelerate", "two optimizers", two_optimizers, refused="2 optimizers"),
    row("accelerate", "an FSDP plugin", sharded, refused="FSDP, which lays the model out"),
    row("accelerate", "torch.compile", partial(trained, dynamo_backend="eager"), refused="not compiled again"),
)  # fmt: skip
