"""One declaration gives a field its flag, its variable and its help."""

from dataclasses import dataclass

import click
from click.testing import CliRunner

from services.common.options import option, with_options


@dataclass(frozen=True)
class Shared:
    who: tuple[str, ...] = option((), "May be given several times.", env="TEST_WHO")
    open: bool = option(False, "A switch.", env="TEST_OPEN")


@dataclass(frozen=True)
class Own(Shared):
    port: int = option(7, "A number.")


@click.command()
@with_options(Own)
def show(options: Own) -> None:
    click.echo(repr(options))


def shown(*arguments: str, **variables: str) -> str:
    return CliRunner(env=variables).invoke(show, arguments).output.strip()


def test_a_field_with_a_tuple_takes_several_values_from_flags_or_its_variable() -> None:
    assert shown() == repr(Own())
    assert shown("--who", "anna", "--who", "olga") == repr(Own(who=("anna", "olga")))
    assert shown(TEST_WHO="anna shardring://client/olga") == repr(
        Own(who=("anna", "shardring://client/olga"))
    )
    assert shown("--port", "8", TEST_OPEN="1") == repr(Own(port=8, open=True))


def test_what_a_command_has_of_its_own_is_shown_first() -> None:
    words = shown("--help")
    assert words.index("--port") < words.index("--who") < words.index("--open")
