"""Absent packages: an integration whose package is not installed says how to get it."""

from __future__ import annotations

from autopar.errors import ConfigurationError


def absent(package: str, extra: str) -> ConfigurationError:
    """The error of an integration that needs `package`, which the extra `extra` of autopar brings."""
    return ConfigurationError(
        f"this integration needs the package {package}, which is not installed: pip install 'autopar[{extra}]'"
    )
