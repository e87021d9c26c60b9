"""Prompts to train on: train splits, and turns that the target writes itself. Test rows are refused by hash."""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sgl_specflow.errors import SpecflowConfigError

MBPP_TRAIN, MBPP_TEST = range(601, 975), range(11, 511)
MBPP_FIELDS = ("task_id", "text", "code", "test_list")
# Rows of the train splits that launch/prompts.jsonl ships: measured on, so never trained on.
SHIPPED_GSM8K_ROW, SHIPPED_MBPP_TASK = 2, 605
MARKER = "\0"
# Starts of a user turn that the target completes.
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
        texts = [row["question"] for row in _lines(folder / "gsm8k_test.jsonl", "question")]
        texts += [row["problem"] for row in _lines(folder / "math500.jsonl", "problem")]
        texts += [turn for row in _lines(folder / "mt_bench.jsonl", "turns") for turn in row["turns"]]
        tasks = [task for task in _lines(folder / "mbpp.jsonl", *MBPP_FIELDS) if task["task_id"] in MBPP_TEST]
        return cls(texts + [task["text"] for task in tasks] + [mbpp_text(task) for task in tasks])

    def __contains__(self, text: str) -> bool:
        text = _normal(text)
        return _digest(text) in self.whole or (len(text) >= self.START and _digest(text[: self.START]) in self.starts)

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
        rows = _lines(Path(folder, "gsm8k_train.jsonl"), "question", "answer")
        pairs = [(row["question"], row["answer"]) for index, row in enumerate(rows) if index != SHIPPED_GSM8K_ROW]
    else:
        tasks = [task for task in _lines(Path(folder, "mbpp.jsonl"), *MBPP_FIELDS) if task["task_id"] in MBPP_TRAIN]
        pairs = [(mbpp_text(task), task["code"]) for task in tasks if task["task_id"] != SHIPPED_MBPP_TASK]
    tokens = chat_tokens(tokenizer, [text for text, _ in pairs])
    return [
        Prompt(source, text, tokens[index], index >= len(pairs) - held_out, answer)
        for index, (text, answer) in enumerate(pairs)
    ]


def chat_tokens(tokenizer, texts: list[str]) -> list[list[int]]:
    """The chat template around each user turn, up to where the assistant speaks.

    The template runs once and its frame is put around every text, where that gives what the template itself gives for
    the first text; else the template runs for each.
    """
    if not texts:
        return []
    before, after = _rendered(tokenizer, MARKER).split(MARKER)
    if before + texts[0] + after == _rendered(tokenizer, texts[0]):
        framed = [before + text + after for text in texts]
    else:
        framed = [_rendered(tokenizer, text) for text in texts]
    return tokenizer(framed, add_special_tokens=False)["input_ids"]


def turn_start(tokenizer) -> str:
    """Everything that the chat template puts before a user's words."""
    return _rendered(tokenizer, MARKER).split(MARKER)[0]


def _rendered(tokenizer, text: str) -> str:
    chat = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)


def openings(count: int, train: list[Prompt], seed: int) -> Iterator[str]:
    """`count` starts of a user turn for the target to complete: nothing, a common opening, or the first four to ten
    words of a train prompt, so that its own turns cover all kinds."""
    chance, texts = random.Random(seed), {}
    for prompt in train:
        if not prompt.held_out:
            texts.setdefault(prompt.source, []).append(prompt.text)
    for _ in range(count):
        kind = chance.random()
        if kind < 0.25 or not texts:
            yield ""
        elif kind < 0.5:
            yield chance.choice(OPENINGS)
        else:
            text = chance.choice(texts[chance.choice(sorted(texts))])
            yield " ".join(text.split()[: chance.randint(4, 10)])


def self_written(texts: Iterable[str], tokenizer, test_rows: TestRows, held_out: int) -> list[Prompt]:
    """Turns that the target wrote, as prompts: doubles, very short ones and test rows are dropped."""
    kept = dict.fromkeys(text.strip() for text in texts)
    kept = [text for text in kept if len(text) >= 12 and text not in test_rows]
    tokens = chat_tokens(tokenizer, kept)
    return [Prompt("self_written", text, tokens[index], held_out=index < held_out) for index, text in enumerate(kept)]


def _normal(text: str) -> str:
    return "".join(letter for letter in text.lower() if letter.isalnum())


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:16]


def _lines(file: Path, *fields: str) -> list[dict]:
    """The rows of a JSONL file. Raises SpecflowConfigError for a line that is none, or lacks a field, by its number."""
    rows = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not all(name in row for name in fields):
            raise SpecflowConfigError(
                given=f"{file}, line {number}: {line[:60]!r}",
                allowed=f"one JSON object a line with {', '.join(fields)}",
                todo="mend the file, or fetch it again",
            )
        rows.append(row)
    return rows
