"""Generate the checked-in Python code under protos/gen/python from the protos.

Path equals package, so the imports in the generated code need no rewriting. `make gen` replaces
the code; with --check (`make check`) nothing is written, and a difference is an error.
"""

import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).parent
OUTPUT = PROTOS / "gen" / "python"


def main() -> None:
    """Replace or check the generated code; exit non-zero when protoc refuses or it differs."""
    with tempfile.TemporaryDirectory(dir=PROTOS) as folder:
        made = Path(folder) / "python"
        generate(made)
        if "--check" in sys.argv:
            stale = sorted(difference(made, OUTPUT))
            if stale:
                sys.exit("Not what the protos give; run `make gen`:\n" + "\n".join(stale))
        else:
            shutil.rmtree(OUTPUT, ignore_errors=True)
            OUTPUT.parent.mkdir(parents=True, exist_ok=True)
            made.rename(OUTPUT)


def generate(output: Path) -> None:
    """Generate into a new folder; exit non-zero when protoc refuses."""
    output.mkdir()
    sources = sorted(str(p.relative_to(PROTOS)) for p in (PROTOS / "shardring").rglob("*.proto"))
    status = protoc.main(
        [
            "protoc",
            f"-I{PROTOS}",
            f"-I{files('grpc_tools') / '_proto'}",
            f"--python_out={output}",
            f"--grpc_python_out={output}",
            f"--mypy_out=quiet:{output}",
            f"--mypy_grpc_out=quiet:{output}",
            *sources,
        ]
    )
    if status:
        sys.exit(status)
    packages = [output / "shardring", *(p for p in (output / "shardring").rglob("*") if p.is_dir())]
    for package in packages:
        (package / "__init__.py").touch()
    (output / "shardring" / "py.typed").touch()


def difference(made: Path, kept: Path) -> set[str]:
    """Return the names of files that are not the same in both folders."""
    names = {
        str(path.relative_to(folder))
        for folder in (made, kept)
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    return {name for name in names if _content(made / name) != _content(kept / name)}


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


if __name__ == "__main__":
    main()
