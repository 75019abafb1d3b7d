"""The last lines that a process wrote."""

from collections import deque

KEPT_LINES = 50
# A line may be anything; this much of it is enough to know it by.
MAX_LINE_CHARACTERS = 500
_FATAL = "Fatal Python error"


class LogTail:
    """Keeps the last lines of a stream of bytes, whatever their length, in bounded memory."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._open = b""

    def feed(self, data: bytes) -> list[str]:
        """Take what was read next; return the lines that ended with it."""
        *ended, begun = data.split(b"\n")
        new = []
        for part in ended:
            new.append(self._text(self._open + part))
            self._open = b""
        # Four bytes a character at most.
        self._open = (self._open + begun)[: 4 * MAX_LINE_CHARACTERS]
        self._lines += new
        return new

    @property
    def lines(self) -> tuple[str, ...]:
        """The last lines, oldest first; one that has not ended yet is the last."""
        lines = (*self._lines, self._text(self._open)) if self._open else tuple(self._lines)
        return lines[-KEPT_LINES:]

    @property
    def last_words(self) -> str:
        """The line that tells most of an end: what the interpreter died of, else the last one."""
        lines = [line for line in self.lines if line.strip()]
        fatal = [line for line in lines if line.startswith(_FATAL)]
        return (fatal or lines or [""])[-1]

    @staticmethod
    def _text(line: bytes) -> str:
        text = line.decode(errors="replace").rstrip()
        cut = len(text) > MAX_LINE_CHARACTERS
        return f"{text[: MAX_LINE_CHARACTERS - 1]}…" if cut else text
