"""Rows of transformers' Trainer: one job with its arguments, and what is done with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import EarlyStoppingCallback, GPT2LMHeadModel, TrainerCallback, TrainingArguments
from transformers import Trainer as PlainTrainer

from autopar.integrations.transformers import Trainer
from benchmarks.frameworks.framework_models import Stream, Texts, bert, gpt2
from benchmarks.frameworks.framework_row import Run, Stand, row

STEPS = 50


def accuracy(prediction: Any) -> dict[str, float]:
    """Of arrays, as every example of transformers computes it."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def trainer_of(
    stand: Stand,
    *,
    model: Callable[[], Any] = gpt2,
    data: Any = None,
    held: Any = None,
    own: Mapping[str, Any] | None = None,
    autopar: Any = None,
    **settings: Any,
) -> Any:
    """A Trainer. own: further arguments of it; settings: of TrainingArguments."""
    given: dict[str, Any] = {
        "output_dir": str(stand.folder / "run"), "per_device_train_batch_size": stand.batch, "use_cpu": True,
        "per_device_eval_batch_size": stand.batch, "max_steps": STEPS, "learning_rate": 0.05, "optim": "sgd",
        "logging_steps": 1, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "seed": 3,
    } | settings  # fmt: skip
    data = data if data is not None else Texts(8 * STEPS)
    further: dict[str, Any] = {"train_dataset": data, "eval_dataset": held, "callbacks": [], **(own or {})}
    if stand.ours:
        return Trainer(model=model(), args=TrainingArguments(**given), autopar=autopar or {}, **further)
    return PlainTrainer(model=model(), args=TrainingArguments(**given), **further)


def run_of(trainer: Any, **metrics: float) -> Run:
    """What a Trainer that trained has logged and holds."""
    history = trainer.state.log_history
    losses = [entry["loss"] for entry in history if "loss" in entry]
    logged = {
        f"{name} {index}": float(entry[name])
        for index, entry in enumerate(history)
        for name in ("grad_norm", "eval_loss", "eval_accuracy", "learning_rate")
        if name in entry
    }
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return Run(losses=losses, weights=weights, metrics={**logged, **metrics})


def trained(stand: Stand, **settings: Any) -> Run:
    """`train()`."""
    trainer = trainer_of(stand, **settings)
    trainer.train()
    return run_of(trainer)


def evaluated(stand: Stand, *, before: bool = False, **settings: Any) -> Run:
    """`evaluate()` of a set whose last batch is short, by itself and before or behind `train()`."""
    trainer = trainer_of(
        stand, model=bert, data=Texts(400, classes=True), held=Texts(30, classes=True, seed=5),
        own={"compute_metrics": accuracy}, **settings,
    )  # fmt: skip
    found = trainer.evaluate() if before else {}
    trainer.train()
    found = found or trainer.evaluate()
    return run_of(trainer, loss=found["eval_loss"], accuracy=found["eval_accuracy"])


def predicted(stand: Stand) -> Run:
    """`predict()`."""
    trainer = trainer_of(stand, model=bert, data=Texts(400, classes=True))
    trainer.train()
    found = trainer.predict(Texts(30, classes=True, seed=5))
    return run_of(trainer, shape=float(found.predictions.shape[0]), sum=float(abs(found.predictions).sum()))


def resumed(stand: Stand, *, again: Any = None, **settings: Any) -> Run:
    """A run that is cut off behind half of its steps, and one that goes on from its checkpoint. again: what autopar is
    asked for then."""
    settings = {"save_strategy": "steps", "save_steps": STEPS // 2, **settings}
    trainer_of(stand, **settings).train()
    if again is not None:
        settings["autopar"] = again
    trainer = trainer_of(stand, **settings)
    trainer.train(resume_from_checkpoint=str(stand.folder / "run" / f"checkpoint-{STEPS // 2}"))
    return run_of(trainer)


def last_resumed(stand: Stand) -> Run:
    """`resume_from_checkpoint=True`, which finds the last checkpoint."""
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 20, "save_total_limit": 1}
    trainer_of(stand, **settings, max_steps=20).train()
    trainer = trainer_of(stand, **settings)
    trainer.train(resume_from_checkpoint=True)
    return run_of(trainer)


def saved(stand: Stand) -> Run:
    """`save_model`, read again by `from_pretrained`."""
    trainer = trainer_of(stand)
    trainer.train()
    trainer.save_model(str(stand.folder / "model"))
    trainer.accelerator.wait_for_everyone()
    found = run_of(trainer)
    return Run(losses=found.losses, weights=dict(GPT2LMHeadModel.from_pretrained(stand.folder / "model").state_dict()))


def best(stand: Stand, **settings: Any) -> Run:
    """`load_best_model_at_end`, where the best is not the last."""
    return trained(
        stand, held=Texts(16, seed=5), save_strategy="steps", save_steps=10, eval_strategy="steps", eval_steps=10,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True, **settings,
    )  # fmt: skip


def stopped(stand: Stand) -> Run:
    """EarlyStoppingCallback."""
    return best(stand, own={"callbacks": [EarlyStoppingCallback(early_stopping_patience=2)]})


class _Seen(TrainerCallback):
    """Counts the events of a run."""

    steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.steps += 1
        assert given["model"] is not None


def called_back(stand: Stand) -> Run:
    """A callback of the user's, which gets model and optimizer."""
    seen = _Seen()
    trainer = trainer_of(stand, own={"callbacks": [seen]})
    trainer.train()
    return run_of(trainer, seen=float(seen.steps))


def twice(stand: Stand) -> Run:
    """`train()` again, on the same Trainer."""
    trainer = trainer_of(stand, max_steps=20)
    trainer.train()
    trainer.train()
    return run_of(trainer)


def count_tokens(stand: Stand) -> Run:
    """`include_num_input_tokens_seen`."""
    trainer = trainer_of(stand, include_num_input_tokens_seen="all")
    trainer.train()
    return run_of(trainer, tokens=float(trainer.state.num_input_tokens_seen))


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Rows of two lengths, with a mask and ignored labels."""
    long = int(rows[0]["input_ids"][0]) % 2 == 0
    length = 12 if long else 8
    tokens = torch.stack([each["input_ids"][:length] for each in rows])
    labels = tokens.clone()
    labels[::3, :4] = -100
    return {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """A loss of the user's."""
    scores = outputs["logits"][:, :-1].reshape(-1, outputs["logits"].shape[-1])
    loss = torch.nn.functional.cross_entropy(scores, labels[:, 1:].reshape(-1), reduction="sum")
    return loss if num_items_in_batch is None else loss / num_items_in_batch


compute_loss = {"compute_loss_func": summed}

ROWS = (
    row("trainer", "train", trained),
    row("trainer", "epochs, a short last batch", partial(trained, data=Texts(45), max_steps=-1, num_train_epochs=2)),
    row("trainer", "a classifier", partial(trained, model=bert, data=Texts(400, classes=True))),
    row("trainer", "remove_unused_columns", partial(trained, data=Texts(400, extra=True))),
    row("trainer", "gradient accumulation", partial(trained, gradient_accumulation_steps=2, max_steps=25)),
    row("trainer", "accumulation over ignored labels",
        partial(trained, own={"data_collator": padded}, gradient_accumulation_steps=2, max_steps=25)),
    row("trainer", "two lengths, ignored labels", partial(trained, own={"data_collator": padded})),
    row("trainer", "max_grad_norm", partial(trained, max_grad_norm=0.2)),
    row("trainer", "no clipping", partial(trained, max_grad_norm=0.0)),
    row("trainer", "warmup and cosine", partial(trained, lr_scheduler_type="cosine", warmup_steps=10)),
    row("trainer", "dataloader_drop_last", partial(trained, data=Texts(45), dataloader_drop_last=True)),
    row("trainer", "an iterable dataset", partial(trained, data=Stream(400))),
    row("trainer", "split_batches", partial(trained, per_device_train_batch_size=8,
        accelerator_config={"split_batches": True})),
    row("trainer", "bf16", partial(trained, bf16=True, max_grad_norm=0.0), precision="bf16"),
    row("trainer", "evaluate", evaluated),
    row("trainer", "evaluate before train", partial(evaluated, before=True)),
    row("trainer", "eval_strategy", partial(evaluated, eval_strategy="steps", eval_steps=20)),
    row("trainer", "batch_eval_metrics off, eval_accumulation_steps", partial(evaluated, eval_accumulation_steps=2)),
    row("trainer", "predict", predicted),
    row("trainer", "resume_from_checkpoint", resumed),
    row("trainer", "resume the last of a series", last_resumed),
    row("trainer", "resume under another plan",
        partial(resumed, autopar={"dims": {"dp_shard": 2}}, again={"dims": {"tp": 2}}),
        change='Trainer(autopar={"dims": {"tp": 2}})'),
    row("trainer", "save_model", saved),
    row("trainer", "load_best_model_at_end", best),
    row("trainer", "early stopping", stopped),
    row("trainer", "callbacks", called_back),
    row("trainer", "train again", twice),
    row("trainer", "tokens seen", count_tokens),
    row("trainer", "label_smoothing_factor", partial(trained, label_smoothing_factor=0.1)),
    row("trainer", "compute_loss_func", partial(trained, own=compute_loss)),
    row("trainer", "gradient_checkpointing", partial(trained, gradient_checkpointing=True)),
    row("trainer", "weight decay, groups", partial(trained, weight_decay=0.1)),
    row("trainer", "tensor parallelism", partial(trained, autopar={"dims": {"tp": 2}}),
        change='Trainer(autopar={"dims": {"tp": 2}})'),
    row("trainer", "sharded parameters", partial(trained, autopar={"dims": {"dp_shard": 2}}),
        change='Trainer(autopar={"dims": {"dp_shard": 2}})'),
    row("trainer", "two stages", partial(trained, autopar={"dims": {"pp": 2}}),
        change='Trainer(autopar={"dims": {"pp": 2}})'),
    row("trainer", "save_only_model and the best model", partial(best, save_only_model=True),
        refused="save_only_model"),
    row("trainer", "torch_compile", partial(trained, torch_compile=True, torch_compile_backend="eager"),
        refused="not compiled again"),
)  # fmt: skip
