"""What a model card says in its front matter."""

import re

_FRONT_MATTER = re.compile(r"\A---\r?\n(.*?)\r?\n---", re.DOTALL)
_NAME = r"[A-Za-z0-9_.+ -]{1,60}?"
_LICENSE = re.compile(rf"^license:[ \t]*['\"]?({_NAME})['\"]?[ \t]*$", re.MULTILINE)


def license_of(card: str) -> str:
    """Return the licence a README.md names, such as "apache-2.0"; empty when it names none."""
    front = _FRONT_MATTER.match(card[:100_000])
    found = _LICENSE.search(front[1]) if front else None
    return found[1].strip() if found else ""


def license_name(stated: object) -> str:
    """Return a licence as the hub states it; empty when that is no licence's name."""
    return stated if isinstance(stated, str) and re.fullmatch(_NAME, stated) else ""
