"""The clients, built once in a copy of what a clone brings."""

from pathlib import Path

import pytest

from tests.clients.languages import LANGUAGES, Program, build, clone


@pytest.fixture(scope="session")
def cloned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clone(tmp_path_factory.mktemp("clone"))


@pytest.fixture(scope="session")
def failures(cloned: Path) -> dict[str, str]:
    """Build all that can be built here; what failed, by language."""
    return build(cloned, [name for name, one in LANGUAGES.items() if not one.missing()])


@pytest.fixture(params=sorted(LANGUAGES))
def program(request: pytest.FixtureRequest) -> Program:
    """Each language's client in turn; skipped where its toolchain is not installed."""
    name = request.param
    if why := LANGUAGES[name].missing():
        pytest.skip(why)
    failed = request.getfixturevalue("failures")
    assert name not in failed, failed[name]
    return Program(name, request.getfixturevalue("cloned"))


@pytest.fixture
def programs(request: pytest.FixtureRequest) -> list[Program]:
    """Every client that can be built here."""
    present = [name for name, one in LANGUAGES.items() if not one.missing()]
    if not present:
        pytest.skip("; ".join(one.missing() for one in LANGUAGES.values()))
    failed = request.getfixturevalue("failures")
    assert not failed, "\n".join(failed.values())
    return [Program(name, request.getfixturevalue("cloned")) for name in present]
