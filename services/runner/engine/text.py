"""Between text and tokens: prompts in, certain text out. The work is transformers' and mlx-lm's."""

from pathlib import Path
from typing import Any

from mlx_lm import utils

from services.common.errors import Reason, ShardringError
from services.runner.domain.request import Input, Sampling
from services.runner.engine.detokenizer import Detokenizer, Detokenizers

# config.json's names for the longest context, the usual one first.
_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
)


class Tokenizer:
    """The tokenizer of the model in a folder, and the model's limits that concern prompts."""

    def __init__(self, path: Path) -> None:
        config: dict[str, Any] = utils.load_config(path)
        self._tokenizer = utils.load_tokenizer(path, eos_token_ids=config.get("eos_token_id"))
        self._detokenizers = Detokenizers(self._tokenizer)
        self.end_token_ids: set[int] = set(self._tokenizer.eos_token_ids)
        self.has_chat_template = bool(self._tokenizer.has_chat_template)
        self.context_token_count = _context(config)
        self._vocabulary = _text_config(config).get("vocab_size") or len(self._tokenizer)

    def prepare(self, given: Input, sampling: Sampling | None = None) -> tuple[int, ...]:
        """Return the prompt's token ids: at least one, and fewer than the context holds.

        Raises ShardringError: PROMPT_EMPTY, PROMPT_TOO_LONG, NO_CHAT_TEMPLATE,
        CHAT_TEMPLATE_FAILED, INVALID_FIELD for ids outside the vocabulary, those of the logit bias
        in `sampling` too.
        """
        for token_id, _ in sampling.logit_bias if sampling is not None else ():
            self._check_id("sampling.logit_bias", token_id)
        said = given.messages is None or any(message.content for message in given.messages)
        ids = self._encode(given) if said else ()
        if not ids:
            raise ShardringError(Reason.PROMPT_EMPTY, "The prompt is empty; say something.")
        # A template's or tokenizer's own ids are checked with the client's: MLX would not.
        if not 0 <= min(ids) <= max(ids) < self._vocabulary:
            for token_id in ids:
                self._check_id("input.token_ids", token_id)
        limit = self.context_token_count
        if limit and len(ids) >= limit:
            raise ShardringError(
                Reason.PROMPT_TOO_LONG,
                f"The prompt has {len(ids)} tokens, but the model's context holds {limit}, answer "
                "included; shorten it.",
                metadata={"prompt_token_count": len(ids), "context_token_count": limit},
            )
        return ids

    def _check_id(self, field: str, token_id: int) -> None:
        if not 0 <= token_id < self._vocabulary:
            raise ShardringError(
                Reason.INVALID_FIELD,
                f"Token id {token_id} is not in the model's vocabulary of {self._vocabulary}.",
                metadata={
                    "field": field,
                    "value": token_id,
                    "expected": f"0 to {self._vocabulary - 1}",
                },
            )

    def _encode(self, given: Input) -> tuple[int, ...]:
        if given.token_ids is not None:
            return given.token_ids
        if given.messages is not None:
            return self._apply_template(given.messages)
        prompt = given.prompt or ""
        if not prompt:
            return ()
        bos = self._tokenizer.bos_token
        # As mlx-lm does: a prompt that brings its own start token gets no second one.
        add = bos is None or not prompt.startswith(bos)
        return tuple(self._tokenizer.encode(prompt, add_special_tokens=add))

    def _apply_template(self, messages: tuple[Any, ...]) -> tuple[int, ...]:
        if not self.has_chat_template:
            raise ShardringError(
                Reason.NO_CHAT_TEMPLATE,
                "The model has no chat template; give a plain prompt instead of messages.",
            )
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return tuple(self._tokenizer.apply_chat_template(turns, add_generation_prompt=True))
        except Exception as error:  # a template is the model's own code and may raise anything
            raise ShardringError(
                Reason.CHAT_TEMPLATE_FAILED,
                f"The model's chat template refused the messages: {error}",
            ) from error

    def detokenizer(self) -> Detokenizer:
        """Return a new detokenizer, which shares no state with any other."""
        return self._detokenizers.new()

    def text_of(self, token_id: int) -> str:
        """Return one token's text, alone: special tokens by their name, half characters as
        U+FFFD."""
        return self._detokenizers.text_of(token_id)

    def special_id_of(self, text: str) -> int | None:
        """Return the special token of that name, if there is one."""
        return self._detokenizers.special_names.get(text)

    def room(self, prompt_token_count: int) -> int:
        """Return how many tokens may follow a prompt."""
        limit = self.context_token_count
        return limit - prompt_token_count if limit else 2**31 - 1


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def _context(config: dict[str, Any]) -> int | None:
    merged = _text_config(config)
    values = (merged.get(key) for key in _CONTEXT_KEYS)
    return next((value for value in values if isinstance(value, int) and value > 0), None)
