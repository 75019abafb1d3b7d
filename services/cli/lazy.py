"""A click group whose commands are imported only when they are run or asked for help."""

import copy
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click


@dataclass(frozen=True)
class Lazy:
    """Where a command is ("package.module:name"), what it does in a few words, and an example.

    `target` None: a group of further commands.
    """

    target: str | None
    summary: str
    example: str = ""
    commands: "Mapping[str, Lazy] | None" = None


class LazyGroup(click.Group):
    """Lists its commands from a table, without importing them."""

    def __init__(self, *args: Any, lazy: Mapping[str, Lazy], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the table's order."""
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; None when there is none of that name."""
        entry = self._lazy.get(cmd_name)
        return None if entry is None else _load(cmd_name, entry)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands for --help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in self._lazy.items()])


def _load(name: str, entry: Lazy) -> click.Command:
    if entry.target is None:
        return LazyGroup(
            name, lazy=entry.commands or {}, help=entry.summary, epilog=_epilog(entry.example)
        )
    module, _, attribute = entry.target.partition(":")
    command: click.Command = copy.copy(getattr(importlib.import_module(module), attribute))
    command.name, command.epilog = name, _epilog(entry.example)
    return command


def _epilog(example: str) -> str:
    # "\b" keeps click from joining the lines.
    return f"\b\nExample:\n  {example}"
