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


class WrapperRegistry(dict[str, Any]):
    """The registry in which torch's composable wrappers look for their own name before they begin."""

    def __contains__(self, name: object) -> bool:
        refuse_wrapper(_WRAPPERS.get(str(name), str(name)))


_WRAPPERS = {"replicate": "FullyShardedDataParallel or replicate"}
"""By the name that is looked up; FullyShardedDataParallel looks whether the other was there."""
