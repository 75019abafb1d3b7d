"""docs/api.md is what the protos say, and the protos break no client of the released API."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
BUF = Path(sys.executable).with_name("buf")
IMAGE = "protos/api.binpb"


@pytest.fixture(scope="module")
def api_doc() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_doc", ROOT / "scripts" / "api-doc.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look themselves up there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_of_the_api_is_up_to_date(api_doc: ModuleType) -> None:
    expected = api_doc.page(api_doc.described(api_doc.PROTOS))
    assert api_doc.OUTPUT.read_text() == expected, "run `make gen`"


def test_its_links_lead_to_its_headings() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    headings = {
        heading.lower().replace(".", "").replace(" ", "-")
        for heading in re.findall(r"^##+ (.*)$", text, re.MULTILINE)
    }
    links = set(re.findall(r"\]\(#([^)]*)\)", text))
    assert len(links) > 50
    assert links <= headings


def test_every_kind_of_field_is_told(api_doc: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "shardring" / "common" / "v1"
    folder.mkdir(parents=True)
    (folder / "one.proto").write_text(
        'syntax = "proto3";\npackage shardring.common.v1;\n'
        'import "google/protobuf/duration.proto";\n'
        "// Serves.\nservice S {\n  // Watches.\n  rpc Watch(M) returns (stream M);\n}\n"
        "// A message.\nmessage M {\n"
        "  // Counted.\n  optional int64 count = 1;\n"
        "  // In\n  // order | or not.\n  repeated M.Kind kinds = 2;\n"
        "  // By name.\n  map<string, M> by_name = 3;\n"
        "  // How.\n  oneof way {\n    // Fast.\n    google.protobuf.Duration fast = 4;\n  }\n"
        "  // Which.\n  enum Kind {\n    // None.\n    KIND_UNSPECIFIED = 0;\n  }\n"
        "}\n"
    )
    page = api_doc.page(api_doc.described(tmp_path))
    for line in (
        "| `Watch` | [M](#m) | stream of [M](#m) | Watches. |",
        "| `count` | optional int64 | Counted. |",
        "| `kinds` | repeated [M.Kind](#mkind) | In order \\| or not. |",
        "| `by_name` | map of string to [M](#m) | By name. |",
        "### M.Kind",
        "| `KIND_UNSPECIFIED` | 0 | None. |",
    ):
        assert f"{line}\n" in page
    assert "One of `way`. Fast. |\n" in page


def test_a_field_without_a_comment_is_told(api_doc: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "shardring").mkdir()
    (tmp_path / "shardring" / "one.proto").write_text(
        'syntax = "proto3";\npackage shardring.common.v1;\n'
        "// A message.\nmessage M {\n  int64 count = 1;\n}\n"
    )
    with pytest.raises(ValueError, match=r"one\.proto: no comment"):
        api_doc.page(api_doc.described(tmp_path))


def broken_by(folder: Path, old: str = "", new: str = "") -> str:
    """Return what `buf breaking` says of the protos in which `old` became `new`."""
    shutil.copy(ROOT / "buf.yaml", folder)
    shutil.copytree(ROOT / "protos" / "shardring", folder / "protos" / "shardring")
    shutil.copy(ROOT / IMAGE, folder / IMAGE)
    proto = folder / "protos/shardring/topology/v1/topology.proto"
    text = proto.read_text()
    assert old in text
    proto.write_text(text.replace(old, new, 1))
    ended = subprocess.run(
        [BUF, "breaking", "--against", IMAGE],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert bool(ended.returncode) == bool(ended.stdout), ended.stderr
    return ended.stdout


def test_the_protos_break_no_client(tmp_path: Path) -> None:
    assert broken_by(tmp_path) == ""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("int64 memory_total_bytes = 6;", "int64 memory_total_bytes = 60;"),
        ("int64 memory_total_bytes = 6;", "double memory_total_bytes = 6;"),
        ("int64 memory_total_bytes = 6;", "int64 memory_bytes = 6;"),
        ("INTERFACE_KIND_WIFI = 4;", "INTERFACE_KIND_WLAN = 4;"),
    ],
)
def test_what_would_break_clients_is_found(tmp_path: Path, old: str, new: str) -> None:
    assert "topology.proto" in broken_by(tmp_path, old, new)


def test_what_is_added_breaks_nobody(tmp_path: Path) -> None:
    old = "int64 memory_total_bytes = 6;"
    assert broken_by(tmp_path, old, f"{old}\n  // New.\n  int64 later = 1000;") == ""
