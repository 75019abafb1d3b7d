"""The last lines of a process."""

from services.runner.domain.log_tail import KEPT_LINES, MAX_LINE_CHARACTERS, LogTail


def test_lines_however_they_are_cut() -> None:
    tail = LogTail()
    told = [
        line for data in (b"on", b"e\ntw", b"o\n\nthr\xc3", b"\xa9e") for line in tail.feed(data)
    ]
    assert told == ["one", "two", ""]
    assert tail.lines == ("one", "two", "", "thrée")
    assert tail.last_words == "thrée"


def test_only_the_last_lines_are_kept() -> None:
    tail = LogTail()
    tail.feed(b"".join(b"%d\n" % index for index in range(KEPT_LINES + 10)))
    tail.feed(b"open")
    assert len(tail.lines) == KEPT_LINES
    assert (tail.lines[0], tail.lines[-1]) == ("11", "open")


def test_a_line_without_end_takes_no_memory() -> None:
    tail = LogTail()
    for _ in range(1000):
        tail.feed(b"x" * 10_000)
    assert len(tail.lines[0]) == MAX_LINE_CHARACTERS
    assert tail.lines[0].endswith("x…")
    assert tail.feed(b"\nnext\n") == [tail.lines[0], "next"]


def test_what_is_no_text_is_told_all_the_same() -> None:
    tail = LogTail()
    tail.feed(b"\xff\xfe\r\n")
    assert tail.lines == ("\ufffd\ufffd",)


def test_last_words_tell_what_it_died_of() -> None:
    tail = LogTail()
    assert tail.last_words == ""
    tail.feed(b"INFO loading\n\n")
    assert tail.last_words == "INFO loading"
    tail.feed(b"Fatal Python error: Segmentation fault\n\nCurrent thread:\n  File x\n")
    assert tail.last_words == "Fatal Python error: Segmentation fault"
