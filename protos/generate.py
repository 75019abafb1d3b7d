"""Generate the checked-in Python code under protos/gen/python from the protos.

Path equals package, so the imports in the generated code need no rewriting. Run by `make gen`.
"""

import shutil
import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).parent
OUTPUT = PROTOS / "gen" / "python"


def main() -> None:
    """Replace the generated code; exit non-zero when protoc refuses."""
    sources = sorted(str(p.relative_to(PROTOS)) for p in (PROTOS / "shardring").rglob("*.proto"))
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True)
    status = protoc.main(
        [
            "protoc",
            f"-I{PROTOS}",
            f"-I{files('grpc_tools') / '_proto'}",
            f"--python_out={OUTPUT}",
            f"--grpc_python_out={OUTPUT}",
            f"--mypy_out=quiet:{OUTPUT}",
            f"--mypy_grpc_out=quiet:{OUTPUT}",
            *sources,
        ]
    )
    if status:
        sys.exit(status)
    for folder in [p for p in (OUTPUT / "shardring").rglob("*") if p.is_dir()]:
        (folder / "__init__.py").touch()
    (OUTPUT / "shardring" / "__init__.py").touch()
    (OUTPUT / "shardring" / "py.typed").touch()


if __name__ == "__main__":
    main()
