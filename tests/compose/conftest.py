"""One cluster in containers for all tests of this folder. They run by themselves: `make
test-compose`, which is `pytest tests/compose`."""

import contextlib
import shutil
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType

import pytest

from tests.compose.engine import Engine, missing, own_network
from tests.compose.stack import Stack, fetch

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests among others: this process moves into a network of its own."""
    ours = [item for item in items if _HERE in item.path.parents]
    why = "run by themselves: make test-compose" if len(ours) < len(items) else missing()
    for item in ours:
        item.add_marker(pytest.mark.timeout(1200))
        if why:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to a failure what the containers said."""
    report = yield
    stack = getattr(item, "funcargs", {}).get("stack")
    if report.failed and isinstance(stack, Stack):
        report.sections.append(("containers", stack.words()))
    return report


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The cluster of deploy/compose.yaml, built and started. Afterwards nothing of it is left."""
    folder = tmp_path_factory.mktemp("compose")
    with _interrupted_by_sigterm():
        wheels, base = fetch(folder)
        engine = Engine(folder)
        try:
            with own_network():
                try:
                    engine.start()
                    stack = Stack(engine, folder / "clone")
                    stack.build(wheels, base)
                    stack.up()
                    yield stack
                finally:
                    engine.stop()
        finally:
            _remove(folder)
    assert engine.left_behind() == []


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Have SIGTERM end the tests as Ctrl-C does, fixtures and all."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
