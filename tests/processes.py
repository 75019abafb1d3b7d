"""The processes that a test has started, as the machine lists them."""

import psutil


def children_with(word: str, pid: int | None = None) -> list[psutil.Process]:
    """Return the living children of a process (this one: None) whose command line has this word.

    A child that ends while it is looked at counts as gone.
    """
    found = []
    for child in psutil.Process(pid).children():
        try:
            if any(word in part for part in child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found
