"""YAML in which a key stands once in a mapping: plain YAML lets the last one win without a word."""

from __future__ import annotations

from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: list[Any] = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.append(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def load(text: str) -> Any:
    """Plain data. Raises yaml.YAMLError for what is no YAML and for a key that stands twice."""
    return yaml.load(text, Loader=_Loader)
