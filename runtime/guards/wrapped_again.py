"""Wrapped again: what would shard, replicate or reduce a compiled module once more is told that the plan has.

    DistributedDataParallel(module), FullyShardedDataParallel(module)     ConfigurationError, where they ask the module
    fully_shard(module), replicate(module)                                ConfigurationError, where they look whether
                                                                          they were here before
    torch.compile(module), module.compile()                               a warning: it runs as it is

Each of them would gather, cut or add up what was gathered, cut and added up already.
"""

from __future__ import annotations

import logging
from typing import Any, NoReturn

from autopar.errors import ConfigurationError
from autopar.runtime.process_groups import rank

log = logging.getLogger(__name__)


def refuse_wrapper(who: str) -> NoReturn:
    """Raises ConfigurationError. who: wraps."""
    raise ConfigurationError(
        f"a compiled module is not wrapped by {who}: its plan has split its weights and reduced every gradient "
        "already, and says over which ranks; train it as it is"
    )


def say_compiled() -> None:
    """One line for who compiles a compiled module."""
    if rank() == 0:
        log.warning(
            "torch.compile of a compiled module changes nothing, it runs as it is: autopar has captured its graphs, "
            "and a plan whose kernel_backend is 'inductor' has inductor make their kernels"
        )


class WrapperStates(dict[Any, Any]):
    """What torch's composable wrappers keep of a module, where each looks for itself before it begins. Readers of
    modules, such as `torch.distributed.checkpoint.state_dict`, look by other ways, and are let in."""

    def __contains__(self, wrapper: object) -> bool:
        refuse_wrapper(getattr(wrapper, "__name__", str(wrapper)))
