"""Environments, policies and batching strategies by name: an entry point, or `module:Class`.

The config of an attached worker comes from Redis, where others may write: it imports entry points, and of modules only
those that whoever attached it named with --allow.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from vla_stream.config import Environment, Policy, parse
from vla_stream.errors import InputError

if TYPE_CHECKING:
    from vla_stream.environments.protocol import EnvironmentBatch

ENVIRONMENTS = "vla_stream.environments"
POLICIES = "vla_stream.policies"
BATCHING = "vla_stream.batching"
ALLOWED_VARIABLE = "VLA_STREAM_ALLOW"  # comma-separated modules; unset: any, since the config is this host's own


def load_class(group: str, name: str) -> Any:
    """The class behind `name` in an entry-point group, or behind `module:Class`. Raises InputError."""
    if ":" in name:
        module, _, attribute = name.partition(":")
        check_allowed(module, name)
        try:
            return getattr(import_module(module), attribute)
        except (ImportError, AttributeError, ValueError, TypeError) as exc:
            raise InputError(f"{name}: cannot be imported ({exc}); expected module:Class on the Python path") from exc
    found = {point.name: point for point in entry_points(group=group)}
    if name not in found:
        near = difflib.get_close_matches(name, found, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(found)) or 'none'}, or module:Class"
        raise InputError(f"{group}: no entry {name!r}; {remedy}")
    try:
        return found[name].load()
    except (ImportError, AttributeError) as exc:
        raise InputError(
            f"{name}: {found[name].value} cannot be imported ({exc}); install the packages it needs"
        ) from exc


def check_allowed(module: str, subject: str) -> None:
    """Raises InputError if this worker may not import a module that the run's config names."""
    allowed = os.environ.get(ALLOWED_VARIABLE)
    if allowed is not None and module not in allowed.split(","):
        raise InputError(
            f"{subject}: the run's config asks for the module {module}, which this worker may not import; "
            f"attach with --allow {module} if you trust it"
        )


def parse_options(cls: Any, data: Mapping[str, Any], subject: str) -> Any:
    """The class's own Options from a config section. Raises InputError naming the key."""
    options = getattr(cls, "Options", None)
    if not (isinstance(options, type) and issubclass(options, BaseModel)):
        raise InputError(
            f"{subject}: {cls!r:.80} has no Options, expected "
            "a class with its options as a pydantic model, see protocol.py of environments and policies"
        )
    return parse(options, data, f"{subject}: ")


def checked_environment(environment: Environment, subject: str = "environment.options") -> tuple[Any, Any]:
    """The environment's class and its Options, once the class finds all that it needs. Raises InputError.

    subject: where the options stand in the config."""
    cls = load_class(ENVIRONMENTS, environment.name)
    options = parse_options(cls, environment.options, subject)
    if hasattr(cls, "check_installed"):
        cls.check_installed(options)
    return cls, options


def checked_policy(policy: Policy) -> tuple[Any, Any]:
    """The policy's class and its Options, once the class finds all that it needs. Raises InputError."""
    cls = load_class(POLICIES, policy.name)
    if hasattr(cls, "check_installed"):
        cls.check_installed()
    return cls, parse_options(cls, policy.options, "policy.options")


def make_batch(environment: Environment, rows: int) -> EnvironmentBatch:
    """The configured environment batch, in this process."""
    cls, options = checked_environment(environment)
    batch: EnvironmentBatch = cls(rows, environment.max_steps, options)
    return batch
