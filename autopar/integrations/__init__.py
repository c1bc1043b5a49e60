"""Integrations: the training loops of other packages on compiled modules, one module per package.

    from autopar.integrations.accelerate import Accelerator           # instead of accelerate's
    from autopar.integrations.transformers import Trainer             # instead of transformers'
    Trainer(strategy=AutoparStrategy(), ...)                          # Lightning
    fabric = Fabric(strategy=AutoparFabricStrategy(), ...)            # Lightning Fabric
    from autopar.integrations.peft import save_adapter

All of them do the same four things: a loader yields the whole batch on every rank (`whole_batches.py`), the model is
compiled where the framework would wrap it (`prepared_module.py`), gradients are clipped by `autopar.clip_grad_norm_`,
and what is saved goes through `autopar.save` into the framework's folder (`states.py`). The global batch is that of the
framework, the loader's batch times the number of processes, whatever plan is chosen.
"""
