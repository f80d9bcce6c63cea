"""Policies by name, and configs made of them that share one pool of memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from ...runtime.sampling_params import is_int, require
from ...scheduler import SchedulerConfig

POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "priority": {"policy": "priority"},
    "reserve": {"admission": "reserve"},
    "prefill-first": {"order": "prefill-first"},
    "recompute": {"preemption_mode": "recompute"},
    "swap": {"preemption_mode": "swap"},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "no-chunks": {"enable_chunked_prefill": False},
}
_TYPES = {field.name: str(field.type) for field in fields(SchedulerConfig)}
# what these hold is a matter of memory, not of policy
_FIXED = ("num_gpu_blocks", "num_cpu_blocks", "max_model_len")


def make_configs(
    names: Iterable[str],
    *,
    pool_tokens: int,
    host_tokens: int = 0,
    max_model_len: int,
    base: Mapping[str, Any] | None = None,
) -> dict[str, SchedulerConfig]:
    """A config for each name: one of POLICIES, or fields of `SchedulerConfig` as `name=value,name=value`, or both together.

    pool_tokens, host_tokens  tokens whose KV the device and the host hold; their blocks follow from each block size
    base                      fields that all of them have, unless a policy says otherwise
    Raises ValueError naming the policy or the field.
    """
    for name, value, least in (
        ("pool_tokens", pool_tokens, 1),
        ("host_tokens", host_tokens, 0),
        ("max_model_len", max_model_len, 1),
    ):
        require(is_int(value) and value >= least, name, f"an integer >= {least}", value)
    configs = {}
    for policy in names:
        values = {**(base or {}), **fields_of(policy)}
        size = values.get("block_size", SchedulerConfig.block_size)
        require(is_int(size) and size >= 1, "block_size", "an integer >= 1", size)
        if values.get("enable_chunked_prefill") is False:  # a prompt has to fit into a step
            budget = values.get("max_num_batched_tokens", SchedulerConfig.max_num_batched_tokens)
            values["max_num_batched_tokens"] = max(budget, max_model_len)
        values |= {
            "num_gpu_blocks": pool_tokens // size,
            "num_cpu_blocks": host_tokens // size,
            "max_model_len": max_model_len,
        }
        configs[policy] = SchedulerConfig(**values)
    return configs


def fields_of(policy: str) -> dict[str, Any]:
    """The fields that a policy sets."""
    values: dict[str, Any] = {}
    for part in policy.split(","):
        name, equals, text = part.partition("=")
        if not equals:
            if name not in POLICIES:
                raise ValueError(
                    f"policy: expected one of {', '.join(POLICIES)} or field=value, got {name!r}"
                )
            values |= POLICIES[name]
            continue
        if name not in _TYPES or name in _FIXED:
            known = ", ".join(field for field in _TYPES if field not in _FIXED)
            raise ValueError(f"policy: expected a field among {known}, got {name!r}")
        values[name] = _parsed(name, text)
    return values


def _parsed(name: str, text: str) -> Any:
    kind = _TYPES[name]
    if "None" in kind and text == "None":
        return None
    if kind == "bool":
        if text not in ("True", "False"):
            raise ValueError(f"{name}: expected True or False, got {text!r}")
        return text == "True"
    try:
        if "int" in kind:
            return int(text)
        if "float" in kind:
            return float(text)
    except ValueError:
        raise ValueError(f"{name}: expected a number, got {text!r}") from None
    return text
