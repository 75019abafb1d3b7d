"""An answer as it comes, token by token: the text that is certain, and what ends it."""

from dataclasses import dataclass

from mlx_lm.generate import TextStateMachine

from services.runner.domain.request import Stop
from services.runner.engine.text import Tokenizer

# The state of the machine while no stop text has come; a stop text is never empty.
_GOING_ON = ""


@dataclass(frozen=True)
class Ending:
    """Why an answer ended: "stop" or "length". The text or the token, where the request asked to
    stop at it."""

    finish_reason: str
    stop_text: str | None = None
    stop_token_id: int | None = None


class Answer:
    """One answer. Tokens go in by `add`, what can be sent comes out by `take`.

    The token that ends an answer (the model's own end tokens, those of `stop`, special tokens named
    by a stop text) is neither counted nor given out. The tokens that spell a stop text are, but of
    their text only what stands before it. Of several stop texts, the one that is complete first
    ends the answer; of those complete with the same character, the longest.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Stop, max_token_count: int) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._max_token_count = max_token_count
        ends = () if stop.ignore_end_tokens else tokenizer.end_token_ids
        self._ends = dict.fromkeys(ends, Ending("stop"))
        for text in stop.texts:
            if (special := tokenizer.special_id_of(text)) is not None:
                self._ends[special] = Ending("stop", stop_text=text)
        for token_id in stop.token_ids:
            self._ends[token_id] = Ending("stop", stop_token_id=token_id)
        self._stops = _StopTexts(stop.texts) if stop.texts else None
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self.token_count = 0
        self.ending: Ending | None = None

    def add(self, token_id: int) -> Ending | None:
        """Take a token; return why the answer ends with it. After the end, nothing more is taken.

        At the end all text is certain.
        """
        if self.ending is not None:
            return self.ending
        if (ending := self._ends.get(token_id)) is not None:
            return self._end(ending)
        self.token_count += 1
        self._tokens.append(token_id)
        text = self._detokenizer.add(token_id)
        if text and (stop_text := self._say(text)):
            self.ending = Ending("stop", stop_text=stop_text)
        elif self.token_count >= self._max_token_count:
            self._end(Ending("length"))
        return self.ending

    def take(self) -> tuple[tuple[int, ...], str]:
        """Return the tokens that came and the text that is certain, since the last time."""
        taken = tuple(self._tokens), "".join(self._texts)
        self._tokens.clear()
        self._texts.clear()
        return taken

    def finish(self) -> str:
        """Return the text that was not taken yet, that held back included.

        For an answer that is broken off; the tokens are still `take`'s to return.
        """
        if self.ending is None:
            self._flush()
        rest = "".join(self._texts)
        self._texts.clear()
        return rest

    def _end(self, ending: Ending) -> Ending:
        stop_text = self._flush()
        self.ending = Ending("stop", stop_text=stop_text) if stop_text else ending
        return self.ending

    def _flush(self) -> str:
        """Hold nothing back any more; return the stop text that came up in the last bit, or ""."""
        if (text := self._detokenizer.finish()) and (stop_text := self._say(text)):
            return stop_text
        if self._stops is not None:
            self._texts.append(self._stops.held())
        return ""

    def _say(self, text: str) -> str:
        """Give out text up to a stop text; return that, or ""."""
        if self._stops is None:
            self._texts.append(text)
            return ""
        certain, stop_text = self._stops.add(text)
        self._texts.append(certain)
        return stop_text


class _StopTexts:
    """Finds stop texts in a stream of text. mlx-lm's machine does; here it lets go of all text
    that cannot belong to a match any more."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        machine = TextStateMachine(
            {_GOING_ON: [(text, text) for text in texts], **{text: [] for text in texts}}
        )
        self._state = machine.make_state(_GOING_ON)
        self._depths = _depths(self._state[1])

    def add(self, text: str) -> tuple[str, str]:
        """Return the text that is certain, and the stop text that followed it, or ""."""
        self._state, segments = TextStateMachine.split(self._state, text)
        name, node, states, buffer = self._state
        certain: str = segments[0][1]
        if name != _GOING_ON:
            return certain, name
        # The node stands for the longest end of the text that may begin a stop text.
        begun = len(buffer) - self._depths[id(node)]
        self._state = name, node, states, buffer[begun:]
        return certain + buffer[:begun], ""

    def held(self) -> str:
        """Return the text that is held back, and hold it no more."""
        self._state, rest, _ = TextStateMachine.flush(self._state)
        return str(rest)


def _depths(root: dict[str, object]) -> dict[int, int]:
    """Return how many characters lead to each node of a trie, by the node's `id`."""
    depths, level = {id(root): 0}, [root]
    depth = 0
    while level:
        depth += 1
        level = [
            child
            for node in level
            for character, child in node.items()
            # Its other entries have longer names.
            if len(character) == 1 and isinstance(child, dict)
        ]
        depths |= {id(node): depth for node in level}
    return depths
