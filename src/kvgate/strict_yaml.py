"""YAML that is safe to read: a key stands once, no aliases, few levels, and one line for whatever is wrong.

Plain YAML lets the last of two equal keys win without a word, and aliases make a short file as large as memory.
"""

from __future__ import annotations

from typing import Any

import yaml

from kvgate.typed import check_depth


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(None, None, "an alias (*name); write the value out", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: list[Any] = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.append(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def load(text: str, where: str = "text") -> Any:
    """Plain data. ValueError of one line, beginning with ``where``, for what cannot be read."""
    try:
        found = yaml.load(text, Loader=_Loader)
        check_depth(found)
    except RecursionError as error:
        raise ValueError(f"{where}: nested too deeply; a few levels are enough") from error
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        # The loader's own errors, and those of the constructors of its numbers and dates.
        raise ValueError(f"{where}: not YAML: {' '.join(str(error).split())[:300]}") from error
    return found
