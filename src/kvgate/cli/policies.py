"""``kvgate policies``: the policies that can be named, with their parameters."""

from __future__ import annotations

import argparse
import json
from typing import Any

from kvgate.cli.output import DONE


def add_parser(commands: Any) -> None:
    """Add the command to an argparse subparsers object."""
    parser = commands.add_parser("policies", description="List the policies that can be named.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=main)


def main(options: argparse.Namespace) -> int:
    """List them."""
    from kvgate.compressors.catalog import catalog, parameters

    found: dict[str, Any] = {
        name: {
            "about": (policy.__doc__ or "").strip().splitlines()[0],
            "parameters": {key: value.default for key, value in parameters(policy).items() if key != "params"},
        }
        for name, policy in sorted(catalog().items())
    }
    if options.json:
        print(json.dumps(found, indent=1))
        return DONE
    for name, entry in found.items():
        print(f"{name:16} {entry['about']}")
        for key, default in entry["parameters"].items():
            print(f"{'':16}   {key} (default {default})")
    return DONE
