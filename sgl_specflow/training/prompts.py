"""Prompts to train on: train splits, and turns that the target writes itself. Test rows are refused by hash."""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sgl_specflow.errors import SpecflowConfigError

MBPP_TRAIN, MBPP_TEST = range(601, 975), range(11, 511)
# Rows of the train splits that launch/prompts.jsonl ships: measured on, so never trained on.
SHIPPED_GSM8K_ROW, SHIPPED_MBPP_TASK = 2, 605
# Starts of a user turn that the target completes, half of them none at all.
OPENINGS = (
    "Write a", "Write a short", "Write an email", "Write a story about", "Write a Python function", "Compose a", "Create a",
    "Explain", "Explain how", "Explain the difference between", "Describe", "What is", "What are", "What would", "How do",
    "How can I", "Why", "Can you", "Imagine you are", "You are a", "Give me", "Provide", "Suggest", "Summarize", "Discuss",
    "Compare", "Solve", "Find", "If a", "Suppose", "Given the following", "Implement", "Rewrite", "Translate", "Classify",
    "Analyze", "Evaluate", "Outline", "Design", "Help me", "Tell me about", "Pretend", "Draft", "Identify", "Extract",
)  # fmt: skip


@dataclass(frozen=True)
class Prompt:
    """A chat prompt up to the start of the assistant's turn; `text` is the user's turn. `held_out` prompts validate and
    are never trained on. `answer`: the data set's own answer, where there is one."""

    source: str
    text: str
    tokens: list[int]
    held_out: bool = False
    answer: str = ""


class TestRows:
    """Fingerprints of all test prompts of the data folder: of the whole text and of its first sentence-long part.

    A text is refused when its fingerprint, letters and digits only, in lower case, equals a test row's, or when either
    contains the other's first 120 such characters.
    """

    __test__ = False  # no test class, whatever its name says to pytest
    START = 120

    def __init__(self, texts: Iterable[str]):
        texts = [_normal(text) for text in texts]
        self.whole = {_digest(text) for text in texts}
        self.starts = {_digest(text[: self.START]) for text in texts if len(text) >= self.START}

    @classmethod
    def of(cls, folder: str | Path) -> "TestRows":
        """From gsm8k_test, math500, mt_bench (all turns) and MBPP's test tasks.

        Raises FileNotFoundError where the folder lacks one: a check that cannot see a test set would pass it.
        """
        folder = Path(folder)
        texts = [row["question"] for row in _lines(folder / "gsm8k_test.jsonl")]
        texts += [row["problem"] for row in _lines(folder / "math500.jsonl")]
        texts += [turn for row in _lines(folder / "mt_bench.jsonl") for turn in row["turns"]]
        tasks = [task for task in _lines(folder / "mbpp.jsonl") if task["task_id"] in MBPP_TEST]
        return cls(texts + [task["text"] for task in tasks] + [mbpp_text(task) for task in tasks])

    def __contains__(self, text: str) -> bool:
        text = _normal(text)
        return _digest(text) in self.whole or (
            len(text) >= self.START and _digest(text[: self.START]) in self.starts
        )

    def refuse(self, prompts: Iterable[Prompt]) -> None:
        """Raise SpecflowConfigError naming the first prompt that is a test row."""
        for prompt in prompts:
            if prompt.text in self:
                raise SpecflowConfigError(
                    given=f"a {prompt.source} prompt that is a row of a test set: {prompt.text[:80]!r}",
                    allowed="prompts of train splits, and prompts that the target writes itself",
                    todo="take the row out of the training data",
                )


def mbpp_text(task: dict) -> str:
    """An MBPP task as a user's turn, as `eval.prompts` asks it."""
    return task["text"] + "\nYour code should pass these tests:\n" + "\n".join(task["test_list"])


def train_prompts(folder: str | Path, source: str, tokenizer, held_out: int) -> list[Prompt]:
    """GSM8K-train questions or MBPP-train tasks; the last `held_out` are marked so, shipped ones are left out.

    Raises FileNotFoundError where `folder` lacks the file.
    """
    if source == "gsm8k":
        rows = _lines(Path(folder, "gsm8k_train.jsonl"))
        pairs = [(row["question"], row["answer"]) for index, row in enumerate(rows) if index != SHIPPED_GSM8K_ROW]
    else:
        tasks = [task for task in _lines(Path(folder, "mbpp.jsonl")) if task["task_id"] in MBPP_TRAIN]
        pairs = [(mbpp_text(task), task["code"]) for task in tasks if task["task_id"] != SHIPPED_MBPP_TASK]
    return [
        Prompt(source, text, chat_tokens(tokenizer, text), index >= len(pairs) - held_out, answer)
        for index, (text, answer) in enumerate(pairs)
    ]


def chat_tokens(tokenizer, text: str) -> list[int]:
    """The chat template around one user turn, up to where the assistant speaks."""
    chat = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]


def turn_start(tokenizer) -> list[int]:
    """Everything that the chat template puts before a user's words."""
    marker = "\0"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False)
    return tokenizer(chat.split(marker)[0], add_special_tokens=False)["input_ids"]


def openings(count: int, train: list[Prompt], seed: int) -> Iterator[str]:
    """`count` starts of a user turn for the target to complete: nothing, a common opening, or the first four to ten
    words of a train prompt, so that its own turns cover all kinds."""
    chance = random.Random(seed)
    usable = [prompt for prompt in train if not prompt.held_out]
    for _ in range(count):
        kind = chance.random()
        if kind < 0.3 or not usable:
            yield ""
        elif kind < 0.6:
            yield chance.choice(OPENINGS)
        else:
            source = chance.choice(sorted({prompt.source for prompt in usable}))
            prompt = chance.choice([p for p in usable if p.source == source])
            yield " ".join(prompt.text.split()[: chance.randint(4, 10)])


def self_written(texts: Iterable[str], tokenizer, test_rows: TestRows, held_out: int) -> list[Prompt]:
    """Turns that the target wrote, as prompts: doubles, very short ones and test rows are dropped."""
    kept, seen = [], set()
    for text in texts:
        text = text.strip()
        if len(text) >= 12 and text not in seen and text not in test_rows:
            seen.add(text)
            kept.append(Prompt("self_written", text, chat_tokens(tokenizer, text), held_out=len(kept) < held_out))
    return kept


def _normal(text: str) -> str:
    return "".join(letter for letter in text.lower() if letter.isalnum())


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:16]


def _lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
