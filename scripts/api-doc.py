"""Write docs/api.md from the protos: services, calls, messages and enums, with their comments.

Run after a proto changed: `.venv/bin/python scripts/api-doc.py`.
"""

import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)
from grpc_tools import protoc

ROOT = Path(__file__).parents[1]
PROTOS = ROOT / "protos"
OUTPUT = ROOT / "docs" / "api.md"

# In the order in which a newcomer needs them.
PACKAGES = {
    "shardring.topology.v1": "Nodes and links",
    "shardring.placement.v1": "Choosing a ring",
    "shardring.runner.v1": "Instances and generation",
    "shardring.downloads.v1": "Models and downloads",
    "shardring.common.v1": "Shared by all",
}
# Documented on a page of its own.
ELSEWHERE = {"shardring.common.v1.ErrorReason": "[errors.md](errors.md) lists the values."}
WELL_KNOWN = "https://protobuf.dev/reference/protobuf/google.protobuf/"

INTRODUCTION = """\
# API

Shardring's services speak gRPC. These are their calls, with what they take and answer; "errors"
are reasons, and [errors.md](errors.md) tells what each means and what to do. Without a presence of
its own (`optional`, messages, `oneof`) a field that is not set is 0, empty or false. Integers are
signed; units stand in the names. [clients.md](clients.md) shows programs that call them.

This page is generated from the comments in `protos/shardring`.
"""

# Field numbers in descriptor.proto, of which the paths of comments are made.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS, _NESTED, _NESTED_ENUMS, _VALUES, _METHODS = 2, 3, 4, 2, 2
_TYPES = {
    number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()
}


@dataclass(frozen=True)
class Commented:
    """A proto file, and what its comments say by the path of what they stand before."""

    file: FileDescriptorProto
    comments: dict[tuple[int, ...], str]

    def comment(self, *path: int) -> str:
        """Return a comment on one line; ValueError when there is none."""
        text = " ".join(self.comments.get(path, "").split())
        if not text:
            raise ValueError(f"{self.file.name}: no comment at {path}")
        return text


def described(protos: Path) -> list[Commented]:
    """Return the files below a folder; exits non-zero when protoc refuses them."""
    sources = sorted(str(path.relative_to(protos)) for path in protos.glob("shardring/**/*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "set.binpb"
        includes = [f"-I{protos}", f"-I{files('grpc_tools') / '_proto'}"]
        status = protoc.main(
            ["protoc", *includes, "--include_source_info", f"--descriptor_set_out={output}"]
            + sources
        )
        if status:
            sys.exit(status)
        found = FileDescriptorSet.FromString(output.read_bytes())
    return [Commented(file, _comments(file)) for file in found.file]


def page(sources: list[Commented]) -> str:
    """Return docs/api.md. ValueError when a package is new or something has no comment."""
    packages = {source.file.package for source in sources}
    if unknown := packages - set(PACKAGES):
        raise ValueError(f"scripts/api-doc.py has no title for {', '.join(sorted(unknown))}")
    lines = [INTRODUCTION, *_contents(sources)]
    for package, title in PACKAGES.items():
        own = [source for source in sources if source.file.package == package]
        lines += [f"## {title}", "", f"Package `{package}`.", ""]
        for part in (_services, _messages, _enums):
            for source in own:
                lines += part(source)
    text = "\n".join(lines).rstrip() + "\n"
    anchors = re.findall(r"^##+ (.*)$", text, re.MULTILINE)
    if len({anchor.lower() for anchor in anchors}) < len(anchors):
        raise ValueError("two headings have the same anchor")
    return text


def _comments(file: FileDescriptorProto) -> dict[tuple[int, ...], str]:
    """Return what stands before each thing, and behind a value or field on its line."""
    return {
        tuple(place.path): place.leading_comments or place.trailing_comments
        for place in file.source_code_info.location
    }


def _contents(sources: list[Commented]) -> Iterator[str]:
    yield "| service | calls |"
    yield "| --- | --- |"
    for package in PACKAGES:
        for source in sources:
            if source.file.package == package:
                for service in source.file.service:
                    calls = ", ".join(method.name for method in service.method)
                    yield f"| [{service.name}](#{service.name.lower()}) | {calls} |"
    yield ""


def _services(source: Commented) -> Iterator[str]:
    for number, service in enumerate(source.file.service):
        yield from (f"### {service.name}", "", source.comment(_SERVICES, number), "")
        yield "| call | takes | answers | |"
        yield "| --- | --- | --- | --- |"
        for place, method in enumerate(service.method):
            comment = source.comment(_SERVICES, number, _METHODS, place)
            yield _row(f"`{method.name}`", *_signature(method), comment)
        yield ""


def _signature(method: MethodDescriptorProto) -> tuple[str, str]:
    takes = ("stream of " if method.client_streaming else "") + _link(method.input_type)
    answers = ("stream of " if method.server_streaming else "") + _link(method.output_type)
    return takes, answers


def _messages(source: Commented) -> Iterator[str]:
    for number, message in enumerate(source.file.message_type):
        yield from _message(source, message, "", (_MESSAGES, number))


def _message(
    source: Commented, message: DescriptorProto, outer: str, path: tuple[int, ...]
) -> Iterator[str]:
    name = f"{outer}{message.name}"
    yield from (f"### {name}", "", source.comment(*path), "")
    if message.field:
        yield "| field | type | |"
        yield "| --- | --- | --- |"
        for number, field in enumerate(message.field):
            comment = source.comment(*path, _FIELDS, number)
            if field.HasField("oneof_index") and not field.proto3_optional:
                choice = message.oneof_decl[field.oneof_index].name
                comment = f"One of `{choice}`. {comment}"
            yield _row(f"`{field.name}`", _type(field, message), comment)
        yield ""
    for number, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from _message(source, nested, f"{name}.", (*path, _NESTED, number))
    for number, enum in enumerate(message.enum_type):
        yield from _enum(source, enum, f"{name}.", (*path, _NESTED_ENUMS, number))


def _enums(source: Commented) -> Iterator[str]:
    for number, enum in enumerate(source.file.enum_type):
        yield from _enum(source, enum, "", (_ENUMS, number))


def _enum(
    source: Commented, enum: EnumDescriptorProto, outer: str, path: tuple[int, ...]
) -> Iterator[str]:
    yield from (f"### {outer}{enum.name}", "", source.comment(*path), "")
    if elsewhere := ELSEWHERE.get(f"{source.file.package}.{outer}{enum.name}"):
        yield from (elsewhere, "")
        return
    yield "| value | number | |"
    yield "| --- | --- | --- |"
    for number, value in enumerate(enum.value):
        comment = source.comment(*path, _VALUES, number)
        yield _row(f"`{value.name}`", str(value.number), comment)
    yield ""


def _type(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    for nested in message.nested_type:
        if nested.options.map_entry and field.type_name.endswith(f".{message.name}.{nested.name}"):
            key, value = (_single_type(part) for part in nested.field)
            return f"map of {key} to {value}"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {_single_type(field)}"
    return f"optional {_single_type(field)}" if field.proto3_optional else _single_type(field)


def _single_type(field: FieldDescriptorProto) -> str:
    return _link(field.type_name) if field.type_name else _TYPES[field.type]


def _link(type_name: str) -> str:
    """Return a link to a type, by its full name with a leading dot."""
    name = type_name.removeprefix(".")
    if name.startswith("google.protobuf."):
        short = name.removeprefix("google.protobuf.")
        return f"[{short}]({WELL_KNOWN}#{short.lower()})"
    package = next(one for one in PACKAGES if name.startswith(f"{one}."))
    short = name.removeprefix(f"{package}.")
    return f"[{short}](#{short.lower().replace('.', '')})"


def _row(*cells: str) -> str:
    return "|" + "".join(f" {cell.replace('|', chr(92) + '|')} |" for cell in cells)


if __name__ == "__main__":
    OUTPUT.write_text(page(described(PROTOS)))
