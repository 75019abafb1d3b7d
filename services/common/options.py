"""Options: frozen dataclasses whose fields have a default and a sentence.

One declaration gives each field its flag, its environment variable and its help text. A field whose
default is a tuple may be given several times; in its variable the values stand between spaces.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import click

Options = TypeVar("Options")


def option(
    default: Any, help: str, *, env: str | None = None, choices: tuple[str, ...] = ()
) -> Any:
    """Declare a field: its default, a sentence, and the variable it is also read from."""
    return dataclasses.field(
        default=default, metadata={"help": help, "env": env, "choices": choices}
    )


def with_options(cls: type[Options]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a click command one flag for each field of `cls`, and pass it the filled `options`."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        inherited = {
            name for base in cls.__mro__[1:] for name in getattr(base, "__annotations__", ())
        }
        # What a command has of its own is shown before what it shares with others.
        fields = sorted(
            dataclasses.fields(cls),  # type: ignore[arg-type]
            key=lambda field: field.name in inherited,
        )

        def run(**values: Any) -> Any:
            options = cls(**{field.name: values.pop(field.name) for field in fields})
            return command(options=options, **values)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        wrapped: Callable[..., Any] = run
        # Carry over parameters that decorators below this one have declared.
        wrapped.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
        for field in reversed(fields):
            choices = field.metadata["choices"]
            flag = f"--{field.name.replace('_', '-')}"
            wrapped = click.option(
                f"{flag}/--no-{flag[2:]}" if field.default is True else flag,
                field.name,
                default=field.default,
                type=click.Choice(choices) if choices else _kind(field.default),
                is_flag=isinstance(field.default, bool),
                multiple=isinstance(field.default, tuple),
                envvar=field.metadata["env"],
                show_envvar=bool(field.metadata["env"]),
                show_default=field.default not in ("", False, ()),
                help=field.metadata["help"],
            )(wrapped)
        return wrapped

    return decorate


def _kind(default: Any) -> type:
    return str if isinstance(default, tuple) else type(default)
