"""Answers: exact text out of single tokens, and what ends them."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.cli.walkthrough import MODEL, MODELS
from services.runner.domain.request import Stop
from services.runner.engine.answer import Answer, Ending
from services.runner.engine.text import Tokenizer
from tests.unit.runner.tokenizers_made import CALL, END, byte_fallback, byte_level, words

FAMILY = "👩‍👩‍👧"


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer(MODELS / MODEL)


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_level(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_fallback(tmp_path_factory.mktemp("byte_fallback"))


@pytest.fixture(scope="module")
def wordwise(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return words(tmp_path_factory.mktemp("words"))


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(inner(tokenizer).encode(text, add_special_tokens=False))


def inner(tokenizer: Tokenizer) -> Any:
    return tokenizer._tokenizer


def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(inner(tokenizer).decode(ids, skip_special_tokens=True))


def id_of(tokenizer: Tokenizer, name: str) -> int:
    return int(inner(tokenizer).convert_tokens_to_ids(name))


def said(answer: Answer, ids: list[int]) -> tuple[list[str], list[int]]:
    """Feed tokens until the answer ends; return the text that came with each, and the tokens."""
    texts: list[str] = []
    tokens: list[int] = []
    for token_id in ids:
        ending = answer.add(token_id)
        taken, text = answer.take()
        texts.append(text)
        tokens += taken
        if ending is not None:
            break
    if answer.ending is None:
        texts.append(answer.finish())
    return texts, tokens


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, str]:
    """Return text up to the stop text that is complete first, and that stop text or ""."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text.endswith(stop, 0, end)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, ""


def test_a_character_of_many_tokens_comes_in_one_piece(bytewise: Tokenizer) -> None:
    ids = ids_of(bytewise, FAMILY)
    texts, tokens = said(Answer(bytewise, Stop(), 100), ids)
    assert len(ids) == len(FAMILY.encode())
    assert tokens == ids
    assert "".join(texts) == FAMILY
    assert [text for text in texts if text] == list(FAMILY)


def test_half_a_character_at_the_end_is_shown_as_such(bytewise: Tokenizer) -> None:
    answer = Answer(bytewise, Stop(), 4)
    texts, _ = said(answer, ids_of(bytewise, "a👩")[:4])
    assert texts == ["a", "", "", "\ufffd"]
    assert answer.ending == Ending("length")


def test_a_first_space_is_the_models_own(bytewise: Tokenizer, pieces: Tokenizer) -> None:
    assert "".join(said(Answer(bytewise, Stop(), 9), ids_of(bytewise, "  a"))[0]) == "  a"
    # But SentencePiece's decoder adds one, and takes it away again.
    ids = [id_of(pieces, piece) for piece in ("▁", "▁a", "▁a")]
    assert "".join(said(Answer(pieces, Stop(), 9), ids)[0]) == " a a"


def test_special_tokens_are_no_text_and_others_are(bytewise: Tokenizer) -> None:
    call, think = id_of(bytewise, CALL), id_of(bytewise, "<think é>")
    answer = Answer(bytewise, Stop(), 9)
    texts, tokens = said(answer, [call, *ids_of(bytewise, "ab"), think, call])
    assert (texts, len(tokens)) == (["", "ab", "<think é>", "", ""], 4)
    assert answer.token_count == 4


def test_ids_that_stand_for_nothing_are_no_text(
    bytewise: Tokenizer, pieces: Tokenizer, wordwise: Tokenizer
) -> None:
    for tokenizer in (bytewise, pieces, wordwise):
        beyond = len(inner(tokenizer)) + 3
        texts, tokens = said(Answer(tokenizer, Stop(), 2), [beyond, beyond])
        assert (texts, tokens) == (["", ""], [beyond, beyond])
        assert tokenizer.text_of(beyond) == ""


def test_an_end_token_is_neither_counted_nor_sent(tiny: Tokenizer) -> None:
    end = id_of(tiny, END)
    answer = Answer(tiny, Stop(), 9)
    texts, tokens = said(answer, [*ids_of(tiny, "Paris"), end, end])
    assert "".join(texts) == "Paris"
    assert end not in tokens
    assert answer.ending == Ending("stop")
    assert answer.token_count == len(tokens)
    assert answer.add(5) == Ending("stop")
    assert answer.take() == ((), "")


def test_end_tokens_may_be_ignored(tiny: Tokenizer) -> None:
    end = id_of(tiny, END)
    answer = Answer(tiny, Stop(ignore_end_tokens=True), 3)
    texts, tokens = said(answer, [end, end, end])
    assert (texts, tokens, answer.ending) == (["", "", ""], [end] * 3, Ending("length"))


def test_a_requests_own_token_ends_it(tiny: Tokenizer) -> None:
    end, full_stop = id_of(tiny, END), id_of(tiny, ".")
    stop = Stop(token_ids=(full_stop, end), ignore_end_tokens=True)
    answer = Answer(tiny, stop, 9)
    _, tokens = said(answer, [70, full_stop])
    assert (tokens, answer.ending) == ([70], Ending("stop", stop_token_id=full_stop))
    answer = Answer(tiny, stop, 9)
    said(answer, [end])
    assert answer.ending == Ending("stop", stop_token_id=end)


def test_a_special_tokens_name_as_a_stop_text_stops_at_it(bytewise: Tokenizer) -> None:
    answer = Answer(bytewise, Stop(texts=(CALL,)), 99)
    texts, _ = said(answer, [*ids_of(bytewise, "ab"), id_of(bytewise, CALL)])
    assert "".join(texts) == "ab"
    assert answer.ending == Ending("stop", stop_text=CALL)
    # Spelled by ordinary tokens it stops as well.
    spelled = [id_of(bytewise, character) for character in CALL]
    answer = Answer(bytewise, Stop(texts=(CALL,)), 99)
    assert "".join(said(answer, spelled)[0]) == ""
    assert answer.ending == Ending("stop", stop_text=CALL)


def test_a_stop_text_over_tokens_is_held_back_and_never_sent(tiny: Tokenizer) -> None:
    ids = [id_of(tiny, character) for character in "xa--bc"]
    answer = Answer(tiny, Stop(texts=("a--b",)), 99)
    texts, tokens = said(answer, ids)
    assert texts == ["x", "", "", "", ""]
    assert tokens == ids[:5]
    assert answer.ending == Ending("stop", stop_text="a--b")


def test_text_is_let_go_as_soon_as_it_can_belong_to_no_stop_text(tiny: Tokenizer) -> None:
    texts, _ = said(
        Answer(tiny, Stop(texts=("aab",)), 99), [id_of(tiny, character) for character in "aaaac"]
    )
    assert texts == ["", "", "a", "a", "aac", ""]


def test_what_was_held_back_comes_at_the_end(tiny: Tokenizer) -> None:
    ids = [id_of(tiny, character) for character in "xa--"]
    for ending, limit, more in ((Ending("length"), 4, []), (Ending("stop"), 9, [id_of(tiny, END)])):
        answer = Answer(tiny, Stop(texts=("a--b",)), limit)
        assert "".join(said(answer, ids + more)[0]) == "xa--"
        assert answer.ending == ending
    broken_off = Answer(tiny, Stop(texts=("a--b",)), 99)
    for token_id in ids:
        broken_off.add(token_id)
    assert broken_off.finish() == "xa--"
    assert broken_off.take() == (tuple(ids), "")


def test_a_stop_text_with_the_last_token_is_a_stop(tiny: Tokenizer) -> None:
    answer = Answer(tiny, Stop(texts=("b",)), 2)
    said(answer, [id_of(tiny, "a"), id_of(tiny, "b")])
    assert answer.ending == Ending("stop", stop_text="b")


def test_half_a_character_may_complete_a_stop_text(bytewise: Tokenizer) -> None:
    answer = Answer(bytewise, Stop(texts=("a\ufffd",)), 2)
    texts, _ = said(answer, ids_of(bytewise, "aé")[:2])
    assert texts == ["", ""]
    assert answer.ending == Ending("stop", stop_text="a\ufffd")


def test_the_first_complete_stop_text_counts(tiny: Tokenizer) -> None:
    ids = ids_of(tiny, "The capital of France is Paris")
    answer = Answer(tiny, Stop(texts=("France", "an", "ranc", "of Fran", "Paris")), 99)
    assert "".join(said(answer, ids)[0]) == "The capital "
    assert answer.ending == Ending("stop", stop_text="of Fran")


ALPHABET = st.sampled_from("abc \né€👩\u200d\ufffd")
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3).map(tuple)


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, 300), max_size=40),
    text=st.text(ALPHABET, max_size=30),
    stops=STOPS,
    cuts=st.integers(0, 40),
)
def test_any_answer_is_the_decoded_tokens_up_to_the_first_stop_text(
    bytewise: Tokenizer, ids: list[int], text: str, stops: tuple[str, ...], cuts: int
) -> None:
    spelled = [token for byte in text.encode() for token in byte_tokens(bytewise, byte)]
    for tokens in (ids, spelled, ids[:cuts] + spelled + ids[cuts:]):
        check(bytewise, tokens, stops)


def byte_tokens(tokenizer: Tokenizer, byte: int) -> list[int]:
    """Return the token of a byte: byte-level names are one character each."""
    return [token for token in range(256) if tokenizer._detokenizers._bytes[token] == bytes([byte])]


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(0, 1030), max_size=40),
    stops=st.lists(st.text("aeinrst ", min_size=1, max_size=3), max_size=3).map(tuple),
)
def test_and_with_the_tiny_models_tokenizer(
    tiny: Tokenizer, ids: list[int], stops: tuple[str, ...]
) -> None:
    check(tiny, ids, stops)


def check(tokenizer: Tokenizer, ids: list[int], stops: tuple[str, ...]) -> None:
    answer = Answer(tokenizer, Stop(texts=stops, ignore_end_tokens=True), max(1, len(ids)))
    texts, tokens = said(answer, ids)
    text, stop_text = cut(decoded(tokenizer, ids), stops)
    assert "".join(texts) == text
    assert tokens == ids[: answer.token_count]
    if ids:
        assert answer.ending == (Ending("stop", stop_text) if stop_text else Ending("length"))


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab€é👩 ", max_size=30), merged=st.booleans())
def test_pieces_with_bytes_are_decoded_exactly(pieces: Tokenizer, text: str, merged: bool) -> None:
    ids: list[int] = []
    for character in text:
        name = "▁" if character == " " else character
        if merged and name in ("▁", "a", "b", "€"):
            ids.append(id_of(pieces, name))
        else:
            ids += [id_of(pieces, f"<0x{byte:02X}>") for byte in character.encode()]
    texts, _ = said(Answer(pieces, Stop(), 1000), ids)
    assert "".join(texts) == decoded(pieces, ids)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 12), max_size=12))
def test_words_are_decoded_exactly(wordwise: Tokenizer, ids: list[int]) -> None:
    texts, _ = said(Answer(wordwise, Stop(ignore_end_tokens=True), 1000), ids)
    assert "".join(texts) == decoded(wordwise, ids)


def test_answers_share_nothing(bytewise: Tokenizer) -> None:
    first, second = (Answer(bytewise, Stop(texts=("ab",)), 99) for _ in range(2))
    woman, man = ids_of(bytewise, "👩"), ids_of(bytewise, "👨")
    for one, other in zip(woman, man, strict=True):
        first.add(one)
        second.add(other)
    assert (first.take()[1], second.take()[1]) == ("👩", "👨")


@pytest.mark.parametrize(
    ("name", "text"), [("a", "a"), (END, END), ("Ġa", " a"), ("Ã", "\ufffd"), ("<think é>", None)]
)
def test_a_tokens_text_alone(bytewise: Tokenizer, name: str, text: str | None) -> None:
    assert bytewise.text_of(id_of(bytewise, name)) == (name if text is None else text)


def test_a_pieces_text_alone(pieces: Tokenizer, wordwise: Tokenizer) -> None:
    assert [pieces.text_of(id_of(pieces, n)) for n in ("▁a", "<0xE2>", "€")] == [
        " a",
        "\ufffd",
        "€",
    ]
    assert [wordwise.text_of(id_of(wordwise, n)) for n in ("one", CALL)] == ["one", CALL]
