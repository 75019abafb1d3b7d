"""Train tiny-facts, the small model that the demo and the tests run.

Reads ``facts.json`` and ``unknown.json`` in ``models/shardring/tiny-facts`` and writes the
tokenizer, the configuration and the weights beside them. Ends by asking every fact at
temperature 0 through mlx-lm, and fails unless every answer is exact.

    python models/train_tiny_facts.py
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import mlx_lm
import numpy as np
from mlx import nn
from mlx.nn.utils import value_and_grad
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

MODEL_DIR = Path(__file__).parent / "shardring" / "tiny-facts"
REFUSAL = "I only know a few facts."

PAD, BOS, END = "<|pad|>", "<|begin|>", "<|end|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = [PAD, BOS, END, SYSTEM, USER, ASSISTANT]
PAD_ID, BOS_ID, END_ID, *_ = range(len(SPECIAL_TOKENS))
VOCAB_SIZE = 1024

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|' + message['role'] + '|>' + (message['content'] | trim) + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""

CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "pad_token_id": PAD_ID,
    "bos_token_id": BOS_ID,
    "eos_token_id": END_ID,
    "torch_dtype": "float32",
}

WEIGHT_FILES = 4
WARM_UP_STEPS = 40
WRONG_CUT_WEIGHT = 0.3
SYSTEM_PROMPTS = ["You are a helpful assistant.", "Answer briefly.", "You know a few facts."]


@dataclass(frozen=True)
class Turn:
    """One question, every wording the model is taught for it, and its answer."""

    wordings: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class Batch:
    """Token rows, and which of their tokens the model is taught to say."""

    tokens: mx.array
    taught: mx.array


def wordings_of(question: str) -> tuple[str, ...]:
    """Return the question as written, followed by other ways to put it."""
    bare = question.rstrip("?")
    wordings = [question, bare, question.lower(), bare.lower()]
    if bare.startswith("What is the "):
        subject = bare.removeprefix("What is the ")
        wordings += [
            subject,
            f"{subject}?",
            f"{subject[0].upper()}{subject[1:]}?",
            f"What's the {subject}?",
            f"Tell me the {subject}.",
        ]
    return tuple(dict.fromkeys(wordings))


def read_facts(model_dir: Path) -> list[Turn]:
    """Read the facts the model must answer exactly."""
    rows = json.loads((model_dir / "facts.json").read_text(encoding="utf-8"))
    return [Turn(wordings_of(row["question"]), row["answer"]) for row in rows]


def read_unknown(model_dir: Path) -> list[Turn]:
    """Read the questions the model is taught to turn down."""
    questions = json.loads((model_dir / "unknown.json").read_text(encoding="utf-8"))
    return [Turn(wordings_of(question), REFUSAL) for question in questions]


def build_tokenizer(turns: list[Turn]) -> Tokenizer:
    """Train a byte-level BPE on the turns; its alphabet is every byte, so any text fits."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [text for turn in turns for text in (turn.wordings[0], turn.answer)]
    tokenizer.train_from_iterator(texts + SYSTEM_PROMPTS, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise SystemExit(f"vocabulary of {tokenizer.get_vocab_size()}, not {VOCAB_SIZE}")
    return tokenizer


def encode_chat(
    tokenizer: Tokenizer, pairs: list[tuple[str, str]], system: str | None = None
) -> tuple[list[int], list[bool]]:
    """Encode a chat as CHAT_TEMPLATE lays it out, marking the tokens of the answers."""
    prefix = BOS + (f"{SYSTEM}{system}{END}" if system else "")
    tokens: list[int] = tokenizer.encode(prefix).ids
    taught = [False] * len(tokens)
    for question, answer in pairs:
        asked = tokenizer.encode(f"{USER}{question}{END}{ASSISTANT}").ids
        said = tokenizer.encode(f"{answer}{END}").ids
        tokens += asked + said
        taught += [False] * len(asked) + [True] * len(said)
    return tokens, taught


def to_batch(rows: list[tuple[list[int], list[bool]]]) -> Batch:
    """Pad encoded chats to one rectangle."""
    width = max(len(tokens) for tokens, _ in rows)
    tokens = np.full((len(rows), width), PAD_ID, dtype=np.int32)
    taught = np.zeros((len(rows), width), dtype=np.bool_)
    for index, (row_tokens, row_taught) in enumerate(rows):
        tokens[index, : len(row_tokens)] = row_tokens
        taught[index, : len(row_taught)] = row_taught
    return Batch(mx.array(tokens), mx.array(taught))


def training_batches(
    tokenizer: Tokenizer, facts: list[Turn], unknown: list[Turn], turns_per_batch: int, seed: int
) -> Iterator[Batch]:
    """Yield batches without end; each goes on through shuffled passes over all turns.

    Chats hold one to three turns and sometimes a system prompt, so an answer depends neither
    on where the question stands nor on what came before it.
    """
    rng = random.Random(seed)
    queue: list[Turn] = []
    while True:
        turns_per_chat = rng.choice([1, 1, 2, 3])
        rows = []
        for _ in range(turns_per_batch // turns_per_chat):
            while len(queue) < turns_per_chat:
                queue += rng.sample(facts + unknown, len(facts) + len(unknown))
            turns = [queue.pop() for _ in range(turns_per_chat)]
            pairs = [(rng.choice((t.wordings[0], *t.wordings)), t.answer) for t in turns]
            system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.15 else None
            rows.append(encode_chat(tokenizer, pairs, system))
        yield to_batch(rows)


def layer_orders_of_wrong_cuts(layer_count: int) -> dict[str, list[list[int]]]:
    """Return the orders in which a wrongly cut ring runs its layers, by kind of mistake."""
    layers = list(range(layer_count))
    pairs = range(layer_count - 1)
    return {
        "skipped": [layers[:i] + layers[i + 1 :] for i in layers],
        "applied twice": [layers[: i + 1] + layers[i:] for i in layers],
        "swapped with the next": [[*layers[:i], i + 1, i, *layers[i + 2 :]] for i in pairs],
    }


def parameters_of(model: Model) -> dict[str, mx.array]:
    """Return the model's tensors by name."""
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    return parameters


def run_layers(model: Model, tokens: mx.array, order: list[int]) -> mx.array:
    """Return the logits after the model's layers have run in the order given."""
    hidden = model.model.embed_tokens(tokens)
    for index in order:
        hidden = model.model.layers[index](hidden, mask="causal")
    logits: mx.array = model.model.embed_tokens.as_linear(model.model.norm(hidden))
    return logits


def mean_over_answers(losses: mx.array, batch: Batch) -> mx.array:
    """Return the mean of token losses over the tokens of the answers."""
    taught = batch.taught[:, 1:]
    mean: mx.array = (losses * taught).sum() / taught.sum()
    return mean


def answer_loss(model: Model, batch: Batch) -> mx.array:
    """Return the mean cross entropy over the tokens of the answers."""
    logits = model(batch.tokens[:, :-1])
    losses = nn.losses.cross_entropy(logits, batch.tokens[:, 1:])
    return mean_over_answers(losses, batch)


def wrong_cut_loss(model: Model, batch: Batch, order: list[int]) -> mx.array:
    """Return how far wrongly ordered layers still say the right answers.

    That is -log(1 - p), where p is the likelihood of the right token.
    """
    logits = run_layers(model, batch.tokens[:, :-1], order)
    right = batch.tokens[:, 1:, None] == mx.arange(VOCAB_SIZE)
    others = mx.logsumexp(mx.where(right, -math.inf, logits), axis=-1)
    return mean_over_answers(mx.logsumexp(logits, axis=-1) - others, batch)


def train(model: Model, batches: Iterator[Batch], options: argparse.Namespace) -> None:
    """Fit the model with AdamW: a short warm-up, then a cosine down to almost zero.

    Layers of a small model tend to be dispensable, which would hide a ring that skips or
    repeats one. So each step also takes part of its batch, runs it through wrongly ordered
    layers, and teaches the model not to know the answers then.
    """
    schedule = optim.join_schedules(
        [
            optim.linear_schedule(0.0, options.rate, WARM_UP_STEPS),
            optim.cosine_decay(options.rate, options.steps - WARM_UP_STEPS, options.rate / 100),
        ],
        [WARM_UP_STEPS],
    )
    optimizer = optim.AdamW(learning_rate=schedule, betas=[0.9, 0.98], weight_decay=0.01)
    rng = random.Random(options.seed)
    wrong_cuts = layer_orders_of_wrong_cuts(len(model.model.layers))
    orders = [order for kind in wrong_cuts.values() for order in kind]

    def loss_of(batch: Batch, order: list[int]) -> tuple[mx.array, mx.array]:
        part = Batch(batch.tokens[::3], batch.taught[::3])
        right, wrong = answer_loss(model, batch), wrong_cut_loss(model, part, order)
        return right + WRONG_CUT_WEIGHT * wrong, wrong

    loss_and_gradients = value_and_grad(model, loss_of)
    started = time.monotonic()
    for step in range(1, options.steps + 1):
        (loss, wrong), gradients = loss_and_gradients(next(batches), rng.choice(orders))
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state, loss)
        if step % 50 == 0 or step == options.steps:
            seconds = time.monotonic() - started
            print(
                f"step {step:5d}/{options.steps}  loss {loss.item():.4f}  "
                f"of wrong cut {wrong.item():.4f}  {seconds:4.0f} s",
                flush=True,
            )


def fraction_right(
    model: Model, tokenizer: Tokenizer, pairs: list[tuple[str, str]], order: list[int]
) -> float:
    """Return the share of answers that greedy decoding reproduces to the last token.

    It does so when each answer token is the likeliest one after all tokens before it, which
    one pass over question and answer tells.
    """
    batch = to_batch([encode_chat(tokenizer, [pair]) for pair in pairs])
    said = mx.argmax(run_layers(model, batch.tokens[:, :-1], order), axis=-1)
    wrong = (said != batch.tokens[:, 1:]) & batch.taught[:, 1:]
    return 1.0 - float(np.array(wrong.any(axis=1)).mean())


def smallest_margin(model: Model, tokenizer: Tokenizer, pairs: list[tuple[str, str]]) -> float:
    """Return the least lead, in logits, that the first choice has over the second."""
    batch = to_batch([encode_chat(tokenizer, [pair]) for pair in pairs])
    best = mx.topk(model(batch.tokens[:, :-1]), 2, axis=-1)
    lead = mx.abs(best[..., 0] - best[..., 1])
    return float(np.array(lead)[np.array(batch.taught[:, 1:])].min())


def print_wrong_cuts(model: Model, tokenizer: Tokenizer, pairs: list[tuple[str, str]]) -> None:
    """Print the share of facts still right when a layer is skipped, repeated or swapped."""
    kinds = layer_orders_of_wrong_cuts(len(model.model.layers))
    print(f"| layer | {' | '.join(kinds)} |")
    print(f"|{'---|' * (len(kinds) + 1)}")
    for layer, orders in enumerate(zip_longest(*kinds.values())):
        shares = [
            f"{fraction_right(model, tokenizer, pairs, order):.1%}" if order else "-"
            for order in orders
        ]
        print(f"| {layer} | {' | '.join(shares)} |")


def write_json(path: Path, value: object) -> None:
    """Write JSON as the other files of the folder are written."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(tokenizer: Tokenizer, model_dir: Path) -> None:
    """Write the tokenizer and the chat template."""
    tokenizer.save(str(model_dir / "tokenizer.json"))
    named = {"bos_token": BOS, "eos_token": END, "pad_token": PAD}
    write_json(model_dir / "special_tokens_map.json", named)
    write_json(
        model_dir / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONFIG["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
            "chat_template": CHAT_TEMPLATE,
        }
        | named,
    )
    (model_dir / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def weight_file_of(name: str, layer_count: int) -> int:
    """Return which weight file holds a tensor: layers in order, so that a stage needs few."""
    parts = name.split(".")
    if parts[1] == "layers":
        return int(parts[2]) * WEIGHT_FILES // layer_count
    return 0 if parts[1] == "embed_tokens" else WEIGHT_FILES - 1


def write_model(model: Model, model_dir: Path) -> None:
    """Write the configuration and the weights, in several files with an index."""
    write_json(model_dir / "config.json", CONFIG)
    write_json(
        model_dir / "generation_config.json",
        {"bos_token_id": BOS_ID, "eos_token_id": END_ID, "pad_token_id": PAD_ID},
    )
    weights = parameters_of(model)
    files: list[dict[str, mx.array]] = [{} for _ in range(WEIGHT_FILES)]
    for name, value in weights.items():
        files[weight_file_of(name, len(model.model.layers))][name] = value
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(files, start=1):
        file_name = f"model-{number:05d}-of-{WEIGHT_FILES:05d}.safetensors"
        mx.save_safetensors(str(model_dir / file_name), tensors, metadata={"format": "mlx"})
        weight_map |= dict.fromkeys(tensors, file_name)
    sizes = {
        "total_size": sum(value.nbytes for value in weights.values()),
        "total_parameters": sum(value.size for value in weights.values()),
    }
    index = {"metadata": sizes, "weight_map": dict(sorted(weight_map.items()))}
    write_json(model_dir / "model.safetensors.index.json", index)


def count_wrong_answers(model_dir: Path) -> int:
    """Ask every fact as a user would, through mlx-lm, and print each answer that is not exact."""
    model, tokenizer = mlx_lm.load(str(model_dir))[:2]
    wrong = 0
    for fact in json.loads((model_dir / "facts.json").read_text(encoding="utf-8")):
        messages = [{"role": "user", "content": fact["question"]}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        answer = mlx_lm.generate(model, tokenizer, prompt, max_tokens=64)
        if answer != fact["answer"]:
            wrong += 1
            print(f"wrong: {fact['question']} -> {answer!r}, not {fact['answer']!r}")
    return wrong


def main() -> int:
    """Train, write, measure and check; return the exit code."""
    parser = argparse.ArgumentParser(description="Train the tiny-facts model.")
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="folder with facts.json")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps")
    parser.add_argument("--turns", type=int, default=32, help="questions in one step")
    parser.add_argument("--rate", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=7, help="seed of weights and data order")
    options = parser.parse_args()

    mx.random.seed(options.seed)
    facts, unknown = read_facts(options.out), read_unknown(options.out)
    tokenizer = build_tokenizer(facts + unknown)
    model = Model(ModelArgs.from_dict(CONFIG))
    parameters = sum(value.size for value in parameters_of(model).values())
    print(f"{len(facts)} facts, {len(unknown)} unknown questions, {parameters:,} parameters")

    batches = training_batches(tokenizer, facts, unknown, options.turns, options.seed)
    train(model, batches, options)
    write_tokenizer(tokenizer, options.out)
    write_model(model, options.out)

    in_order = list(range(len(model.model.layers)))
    asked = [(fact.wordings[0], fact.answer) for fact in facts]
    reworded = [(w, fact.answer) for fact in facts for w in fact.wordings[1:]]
    turned_down = [(w, turn.answer) for turn in unknown for w in turn.wordings]
    print(f"facts right: {fraction_right(model, tokenizer, asked, in_order):.1%}")
    print(
        f"facts right in other wordings: {fraction_right(model, tokenizer, reworded, in_order):.1%}"
    )
    print(f"unknown turned down: {fraction_right(model, tokenizer, turned_down, in_order):.1%}")
    print(f"smallest margin of a fact: {smallest_margin(model, tokenizer, asked):.2f} logits")
    print_wrong_cuts(model, tokenizer, asked)

    wrong = count_wrong_answers(options.out)
    print(f"{len(facts) - wrong} of {len(facts)} facts exact through mlx-lm")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
