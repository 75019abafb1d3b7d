"""Prints what an image needs beside Shardring itself, one requirement a line.

`python3 deploy/requirements.py [EXTRA ...]`: the base, and what these extras of pyproject.toml add.
`--build`: what building needs. requirements.lock says which version: `pip -c requirements.lock`.
"""

import sys
import tomllib
from pathlib import Path

# They install the rest, and are not in the images.
TOOLS = ("uv",)


def requirements(project: dict[str, object], asked: list[str]) -> list[str]:
    """Return the requirements; `project`: pyproject.toml as read. Raises KeyError for no extra."""
    described: dict = project["project"]  # type: ignore[assignment,type-arg]
    found = list(described["dependencies"])
    for name in asked:
        if name == "--build":
            system: dict = project["build-system"]  # type: ignore[assignment,type-arg]
            found += [*system["requires"], *TOOLS]
        else:
            found += described["optional-dependencies"][name]
    return found


if __name__ == "__main__":
    path = Path(__file__).resolve().parents[1] / "pyproject.toml"
    print("\n".join(requirements(tomllib.loads(path.read_text()), sys.argv[1:])))
