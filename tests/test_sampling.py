"""Sampling keeps the target's distribution: chi-square of the first three tokens against their exact joint law.

In process: the tree and the acceptance rule on a random conditional distribution, with many draws. Served: real
servers with trees that help and trees that do not, for temperature, top-k, top-p and min-p. The same test finds wrong
acceptance rules.
"""

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from served import (
    accept_length,
    generate,
    make_small_head,
    make_small_target,
    make_small_weaver,
    serve,
    tree_flags,
    weaver_options,
)
from transformers import AutoModelForCausalLM

from sgl_specflow.tree import build_tree
from sgl_specflow.verify import accept

TOKENS, LENGTH = 6, 3
SIGNIFICANCE = 1e-6  # a right rule fails once in a million runs; the wrong rules below are at 1e-100


def chi_square_p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """P(a right sampler deviates at least this much); cells that expect fewer than 5 draws are pooled."""
    draws = counts.sum()
    expected = probabilities * draws
    if counts[expected == 0].sum():
        return 0.0
    small = expected < 5
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    keep = expected > 0
    statistic = ((counts[keep] - expected[keep]) ** 2 / expected[keep]).sum()
    return float(chi2.sf(statistic, keep.sum() - 1))


# --- the rule itself --------------------------------------------------------------------------------------------------


def conditional(prefixes: torch.Tensor, seed: int) -> torch.Tensor:
    """Fixed random next-token distributions, [N, TOKENS], of prefixes int64 [N, L] (-1 filled on the right)."""
    code = torch.zeros(prefixes.shape[0], dtype=torch.int64)
    for column in prefixes.T:
        code = code * (TOKENS + 1) + column + 1
    table = torch.randn((TOKENS + 1) ** prefixes.shape[1], TOKENS, generator=torch.Generator().manual_seed(seed))
    return (1.5 * table[code]).softmax(1)


def joint(seed: int) -> np.ndarray:
    law = np.ones((TOKENS,) * LENGTH)
    for path in itertools.product(range(TOKENS), repeat=LENGTH):
        for j in range(LENGTH):
            prefix = torch.tensor([list(path[:j]) + [-1] * (LENGTH - j)])
            law[path] *= conditional(prefix, seed)[0, path[j]].item()
    return law.flatten()


def run(rule, draft_seed: int, budget: int, draws: int = 40000, seed: int = 1) -> np.ndarray:
    """Counts of the first LENGTH tokens when every request draws its own tree's tokens and `rule` commits."""
    generator = torch.Generator().manual_seed(seed + 100)
    committed = torch.full((draws, LENGTH), -1)
    count = torch.zeros(draws, dtype=torch.int64)
    while bool((count < LENGTH).any()):
        drafts = (2 * torch.randn(1, 3, TOKENS, generator=torch.Generator().manual_seed(draft_seed))).log_softmax(2)
        order = drafts.argsort(dim=2, descending=True).expand(draws, -1, -1)[:, :, :4].contiguous()
        tree = build_tree(
            torch.zeros(draws, dtype=torch.int64), drafts.expand(draws, -1, -1).gather(2, order), order, budget
        )
        choice = sample_at_nodes(tree, committed, count, generator, seed)
        accepted = rule(tree, choice)
        for j in range(accepted.tokens.shape[1]):
            write = (j < accepted.length) & (count < LENGTH)
            rows = write.nonzero()[:, 0]
            committed[rows, count[rows]] = accepted.tokens[rows, j]
            count += write
    flat = (committed * torch.tensor([TOKENS**2, TOKENS, 1])).sum(1)
    return torch.bincount(flat, minlength=TOKENS**LENGTH).numpy()


def sample_at_nodes(tree, committed, count, generator, seed):
    """int64 [R, B]: a draw at every node from the law given the committed tokens and the node's path."""
    choice = torch.zeros_like(tree.token)
    mask = tree.ancestor_mask()
    for node in range(tree.budget):
        prefix = committed.clone()
        length = count.clone()
        for ancestor in range(1, node + 1):
            above = mask[:, node, ancestor] & (length < LENGTH)
            rows = above.nonzero()[:, 0]
            prefix[rows, length[rows]] = tree.token[rows, ancestor]
            length += above
        choice[:, node] = torch.multinomial(conditional(prefix, seed), 1, generator=generator)[:, 0]
    return choice


def exact_rule(tree, choice):
    return accept(tree, choice, 3)


def prefers_drafted_children(tree, choice):
    """Wrong: a draft child is taken whenever the target's second draw agrees (acceptance gets two tries)."""
    first = accept(tree, choice, 3)
    again = choice.clone()
    again[:, 0] = choice[:, 1 % tree.budget]
    second = accept(tree, again, 3)
    better = second.length > first.length
    pick = lambda a, b: torch.where(better.view(-1, *[1] * (a.dim() - 1)), b, a)  # noqa: E731
    return type(first)(
        *(pick(getattr(first, f), getattr(second, f)) for f in ("path", "length", "tokens", "bonus", "last_node"))
    )


def forgets_the_path(tree, choice):
    """Wrong: every node's choice is the root's, as if the branch did not matter."""
    return accept(tree, choice[:, :1].expand_as(choice).contiguous(), 3)


@pytest.mark.parametrize("draft_seed, budget", [(0, 1), (0, 2), (1, 8), (2, 16)])
def test_the_rule_is_exact(draft_seed, budget):
    assert chi_square_p_value(run(exact_rule, draft_seed, budget), joint(1)) > SIGNIFICANCE


@pytest.mark.parametrize("rule", [prefers_drafted_children, forgets_the_path])
def test_a_wrong_rule_fails(rule):
    assert chi_square_p_value(run(rule, 1, 8), joint(1)) < 1e-30


# --- the server --------------------------------------------------------------------------------------------------------

DRAWS = 20000
PROMPT = [3, 9, 4, 14, 7]
VOCAB = 16
# 20,000 draws each; every part of SGLang's processing on the tree that helps.
SERVED = {
    "helps": {
        "temperature 0.7": {"temperature": 0.7},
        "min-p 0.15": {"min_p": 0.15},
        "top-k 8, top-p 0.9, temperature 1.3": {"top_k": 8, "top_p": 0.9, "temperature": 1.3},
    },
    "does not help": {"temperature 1": {}},
    "helps, with a Weaver": {"top-k 8, top-p 0.9, temperature 1.3": {"top_k": 8, "top_p": 0.9, "temperature": 1.3}},
}
CASES = [(kind, name) for kind, samplers in SERVED.items() for name in samplers]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_small_target(tmp_path_factory.mktemp("sampling") / "target", sharpness=1.6)


@pytest.fixture(scope="module")
def server(request, target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    helps, with_weaver = request.param.startswith("helps"), "Weaver" in request.param
    head = make_small_head(folder / "head", causal=not with_weaver, confidence=0.05 if helps else 1.0)
    budget, more = (24, ()) if helps else (3, ("--speculative-eagle-topk", "1"))
    flags = tree_flags("dflash_tfm" if with_weaver else "jetflow", head, budget, *more, "--max-running-requests", "64")
    environment = weaver_options(make_small_weaver(folder / "weaver")) if with_weaver else None
    with serve(target, folder / "log", *flags, environment=environment) as running:
        yield request.param, running


def processed(logits: torch.Tensor, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0) -> torch.Tensor:
    """SGLang's processing of one row of logits: temperature, top-k, top-p, min-p, renormalised."""
    probabilities = (logits.double() / temperature).softmax(-1)
    values, order = probabilities.sort(descending=True, stable=True)
    keep = torch.ones(VOCAB, dtype=torch.bool)
    if top_k is not None:
        keep[top_k:] = False
    keep &= ~(values.cumsum(0) - values > top_p)
    keep &= ~(values < min_p * values[0])
    kept = torch.where(keep, values, 0.0)
    return torch.zeros(VOCAB, dtype=torch.double).scatter(0, order, kept / kept.sum())


def exact_joint(target, **params) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
    law = np.zeros((VOCAB,) * LENGTH)

    def visit(path, probability):
        if probability == 0.0:
            return
        if len(path) == LENGTH:
            law[tuple(path)] = probability
            return
        with torch.no_grad():
            row = processed(model(torch.tensor([PROMPT + path])).logits[0, -1], **params)
        for token in range(VOCAB):
            visit(path + [token], probability * row[token].item())

    visit([], 1.0)
    return law.flatten()


@pytest.mark.parametrize("server, sampler", CASES, indirect=["server"])
def test_served_sampling_has_the_exact_distribution(server, target, sampler):
    kind, running = server
    params = SERVED[kind][sampler]
    chunk = 500
    body = {
        "input_ids": [PROMPT] * chunk,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": LENGTH, "ignore_eos": True, **params},
    }
    answers = [answer for batch in generate(running, [body] * (DRAWS // chunk), at_once=2) for answer in batch]
    drawn = np.array([answer["output_ids"] for answer in answers])
    assert drawn.shape == (DRAWS, LENGTH)
    counts = np.bincount(drawn @ np.array([VOCAB**2, VOCAB, 1]), minlength=VOCAB**LENGTH)
    assert chi_square_p_value(counts, exact_joint(target, **params)) > SIGNIFICANCE
    # The tree that helps commits two tokens and more in the step after the prefill; the other hardly ever does.
    assert (accept_length(answers) > 2.2) == kind.startswith("helps")
