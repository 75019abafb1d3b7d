"""What the documents and deployment files say is what there is."""

import dataclasses
import importlib.util
import plistlib
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from services.cli.client import ClientOptions
from services.cli.main import cli
from services.cli.node import NodeOptions
from services.downloads.bootstrap import DownloadsOptions
from services.placement.bootstrap import PlacementOptions
from services.topology.bootstrap import TopologyOptions

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
OPTIONS = (ClientOptions, NodeOptions, TopologyOptions, PlacementOptions, DownloadsOptions)


@pytest.fixture(scope="module")
def errors_doc() -> ModuleType:
    spec = importlib.util.spec_from_file_location("errors_doc", ROOT / "scripts" / "errors-doc.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_errors_is_up_to_date(errors_doc: ModuleType) -> None:
    expected = errors_doc.page(errors_doc.SOURCE.read_text())
    hint = "run .venv/bin/python scripts/errors-doc.py"
    assert errors_doc.OUTPUT.read_text() == expected, hint


@pytest.mark.parametrize(
    "comment",
    [
        "  // No node. UNAVAILABLE.\n  // Do: Wait.\n  // Example: {}\n",  # another code
        "  // No node. NOT_FOUND.\n  // Example: {}\n",  # nothing to do
        "  // No node. NOT_FOUND.\n  // Do: Wait.\n",  # no example
    ],
)
def test_a_reason_with_an_incomplete_comment_is_told(errors_doc: ModuleType, comment: str) -> None:
    with pytest.raises(ValueError, match="NODE_NOT_FOUND"):
        errors_doc.page(f"{comment}  ERROR_REASON_NODE_NOT_FOUND = 100;\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


def test_the_readme_names_every_environment_variable() -> None:
    known = {field.metadata["env"] for cls in OPTIONS for field in dataclasses.fields(cls)} - {None}
    known.add("SHARDRING_HUB_LISTEN")
    named = set(re.findall(r"`(SHARDRING_\w+)`", (ROOT / "README.md").read_text()))
    assert named == known


def test_every_promise_of_security_has_its_test() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    source = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", page)
    assert named
    assert [name for name in named if f"def {name}(" not in source] == []
    for file in re.findall(r"`(tests/[\w/]+\.py)`", page):
        assert (ROOT / file).exists()


def test_contributing_names_every_make_target() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"^\| `make ([\w-]+)` ", (ROOT / "docs/contributing.md").read_text(), re.M)
    assert sorted(named) == sorted(targets)


def deployed() -> dict[str, list[str]]:
    """Return the command that each unit and daemon runs."""
    commands = {}
    for path in sorted((ROOT / "deploy" / "systemd").iterdir()):
        (line,) = re.findall(r"^ExecStart=(.*)$", path.read_text(), re.MULTILINE)
        commands[path.name] = shlex.split(line)
    for path in sorted((ROOT / "deploy" / "launchd").iterdir()):
        daemon = plistlib.loads(path.read_bytes())
        assert path.name == f"{daemon['Label']}.plist"
        commands[path.name] = daemon["ProgramArguments"]
    return commands


@pytest.mark.parametrize("name", deployed())
def test_what_is_deployed_is_a_command_that_exists(name: str) -> None:
    program, *arguments = deployed()[name]
    assert program == "@PROGRAM@"  # which `shardring install` fills in
    # Options are read before --help ends it.
    ended = CliRunner().invoke(cli, [*arguments, "--help"])
    assert ended.exit_code == 0, ended.output


def test_every_process_can_be_deployed_on_both_systems() -> None:
    names = {"topology", "placement", "downloads", "node"}
    assert set(deployed()) == {
        *(f"shardring-{name}.service" for name in names),
        *(f"dev.shardring.{name}.plist" for name in names),
    }
