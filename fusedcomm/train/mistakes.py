"""What a configuration gets wrong, in words: one line each, with the key that was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel


def line_of(root: type[BaseModel], problem: Any) -> str:
    """One of pydantic's findings about `root`, as `a.b.c: what is wrong`."""
    location: tuple[int | str, ...] = problem["loc"]
    key = ".".join(str(part) for part in location)
    kind, value, limits = problem["type"], problem["input"], problem.get("ctx", {})
    if kind == "extra_forbidden":
        return f"{key}: unknown key; {_nearest_key(root, location)}"
    if kind == "missing":
        return f"{key}: missing; it has no default"
    if kind == "literal_error":
        choices = [str(choice) for choice in get_args(_annotation_at(root, location))]
        near = difflib.get_close_matches(str(value), choices, n=1)
        guess = f"; did you mean {near[0]}?" if near else ""
        return f"{key}: must be one of {', '.join(choices)}, not {shown(value)}{guess}"
    rules = {
        "int_type": "must be a whole number",
        "float_type": "must be a number",
        "finite_number": "must be finite",
        "bool_type": "must be true or false",
        "string_type": "must be text",
        "tuple_type": "must be a list",
        "model_type": "must be a section with keys of its own",
        "greater_than": f"must be greater than {limits.get('gt')}",
        "greater_than_equal": f"must be at least {limits.get('ge')}",
        "less_than": f"must be less than {limits.get('lt')}",
        "too_long": f"must have at most {limits.get('max_length')} entries",
        "too_short": f"must have at least {limits.get('min_length')} entries",
    }
    return f"{key}: {rules.get(kind, problem['msg'])}, not {shown(value)}"


def _sections(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section below `section`, as its dotted name and its class."""
    yield prefix, section
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _sections(field.annotation, f"{prefix}{name}.")


def _annotation_at(root: type[BaseModel], location: tuple[int | str, ...]) -> Any:
    *parents, name = location
    section = dict(_sections(root))["".join(f"{parent}." for parent in parents)]
    return section.model_fields[str(name)].annotation


def _nearest_key(root: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """What the user may have meant: a key of the same section that looks alike, else one of another section."""
    *parents, name = location
    sections = dict(_sections(root))
    here = sections["".join(f"{parent}." for parent in parents)].model_fields
    if near := difflib.get_close_matches(str(name), here, n=1):
        return f"did you mean {near[0]}?"
    everywhere = {field: f"{prefix}{field}" for prefix, section in sections.items() for field in section.model_fields}
    if near := difflib.get_close_matches(str(name), everywhere, n=1, cutoff=0.75):
        return f"did you mean {everywhere[near[0]]}?"
    return f"known here: {', '.join(here)}"


def shown(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def in_one_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', error)}"
