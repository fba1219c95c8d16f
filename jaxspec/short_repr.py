"""Short texts for records that have too many fields to print them all."""

import dataclasses
from typing import Any


def changes(record: Any) -> str:
    """The record as a call with only the fields that differ from their defaults."""
    named = [
        f"{field.name}={value!r}"
        for field in dataclasses.fields(record)
        if (value := getattr(record, field.name)) != _default(field)
    ]
    return f"{type(record).__name__}({', '.join(named)})"


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is dataclasses.MISSING:
        return field.default
    return field.default_factory()


def figures(record: Any, **values: Any) -> str:
    """The record's name and these values, with four digits of each float."""
    shown = (f"{name}={_figure(value)}" for name, value in values.items())
    return f"{type(record).__name__}({', '.join(shown)})"


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else repr(value)


def cut(text: str, longest: int = 60) -> str:
    """The text as Python writes it, cut off after `longest` characters."""
    return repr(text) if len(text) <= longest else f"{text[:longest]!r}..."
