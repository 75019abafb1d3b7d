"""Recordings of real systems' formats, with addresses and serial numbers made up."""

from pathlib import Path

FOLDER = Path(__file__).parent / "recordings"


def text(name: str) -> str:
    return (FOLDER / name).read_text()


def linux_root(name: str, root: Path) -> Path:
    """Lay out a recorded /sys and /etc below `root`: lines of "PATH<tab>TEXT" or "PATH -> PATH"."""
    for line in text(f"{name}.sys.txt").splitlines():
        path, arrow, target = line.partition(" -> ")
        if arrow:
            (root / target).mkdir(parents=True, exist_ok=True)
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).symlink_to(root / target)
        else:
            path, _, content = line.partition("\t")
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(content.replace("\\n", "\n") + "\n")
    return root
