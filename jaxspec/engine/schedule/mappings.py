"""Read-only mappings, and copies of them with changes."""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

NONE: MappingProxyType[Any, Any] = MappingProxyType({})


def changed[K, V](before: MappingProxyType[K, V], changes: Mapping[K, V]) -> MappingProxyType[K, V]:
    """A read-only copy with changes. `copy` copies the dict as it is, whereas `dict(before)` would
    compute the hash of every key."""
    after = before.copy()
    after.update(changes)
    return MappingProxyType(after)


def removed[K, V](before: MappingProxyType[K, V], keys: Collection[K]) -> MappingProxyType[K, V]:
    """A read-only copy without some keys."""
    if not keys:
        return before
    after = before.copy()
    for key in keys:
        after.pop(key, None)
    return MappingProxyType(after)
