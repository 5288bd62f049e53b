"""YAML files into frozen, typed sections: every mistake in one line that names its key."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from fusedcomm.train.mistakes import in_one_line, line_of, shown


class ConfigError(ValueError):
    """The configuration cannot be used; `lines` holds one mistake each, as `key: what is wrong; the remedy`."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = list(lines)


class Section(BaseModel):
    """Keys of a file that belong together."""

    # Strict: "4" is no number and 1 is no truth value, so that a slip is reported and not guessed at.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Root = TypeVar("Root", bound=Section)


def read_keys(path: Path, root: type[Section]) -> dict[str, Any]:
    """What a file that should hold the keys of `root` has; ConfigError where it cannot be read, or holds no keys."""
    try:
        raw = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"cannot be read: {error.strerror}"]) from error
    # Of text that is no UTF-8, and of a date that there is not, a ValueError.
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError([in_one_line(error)]) from error
    raw = {} if raw is None else raw
    if not isinstance(raw, dict):
        raise ConfigError([f"holds {shown(raw)}; it must hold the keys {', '.join(root.model_fields)}"])
    return raw


def parse(root: type[Root], raw: Mapping[str, Any]) -> Root:
    """Nested dictionaries, as YAML gives them, into `root`; ConfigError names every key at fault."""
    try:
        return root.model_validate(dict(raw))
    except ValidationError as error:
        lines = [line_of(root, problem) for problem in error.errors()]
        raise ConfigError(list(dict.fromkeys(lines))) from error


def read_yaml(text: str) -> Any:
    """What the text says; yaml.YAMLError or another ValueError where it says nothing that YAML knows."""
    # _Loader is a SafeLoader.
    return yaml.load(text, Loader=_Loader)


class _Loader(yaml.SafeLoader):
    """YAML with 1e-3 as a number (YAML 1.1 wants 1.0e-3) and without a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                # No key at all, which the base class says.
                continue
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} is given twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
