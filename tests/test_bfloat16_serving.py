"""Tree servers in bfloat16 with heads of 128 and 256, whose attention on Hopper is the CUDA kernel: its place in the server,
not its arithmetic (test_tree_attention_cuda.py has that). Greedy answers are plain decoding's but for near ties."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from served import generate, make_small_head, make_small_target, serve, tree_flags
from test_serving_greedy import greedy, prompts

# Differences of log-probabilities where both servers have read the same text, of each answer's tokens up to the first that
# is another (there, of the two choices: a near tie). Bfloat16 on a CPU gives 0.10 at most, 0.009 in the mean.
MOST, MEAN = 0.3, 0.03


def gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")(test))


def tokens_and_log_probs(answer: dict) -> tuple[list[int], list[float]]:
    return answer["output_ids"], [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def differences(plain: list[dict], tree: list[dict]) -> list[float]:
    """Of log-probabilities, up to and with the token at which two answers part."""
    found = []
    for (a, p), (b, q) in zip(map(tokens_and_log_probs, plain), map(tokens_and_log_probs, tree)):
        same = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a))
        found += [abs(x - y) for x, y in zip(p[: same + 1], q[: same + 1])]
    return found


@gpu
@pytest.mark.parametrize("head_dim", [128, 256])
def test_answers_in_bfloat16_are_plain_decodings_but_for_near_ties(head_dim, tmp_path):
    target = make_small_target(tmp_path / "target", head_dim=head_dim, max_position_embeddings=512)
    head = make_small_head(
        tmp_path / "head", True, head_dim=head_dim, num_target_layers=3, dtype="bfloat16", max_position_embeddings=512
    )
    # Lengths of one tile and of several; eight at once, and one.
    requests = [greedy(ids, 60) | {"return_logprob": True} for ids in prompts(24, seed=61, longest=300)]
    bfloat16 = ["--dtype", "bfloat16", "--max-total-tokens", "6000"]
    flags = {"plain": ["--disable-overlap-schedule"], "tree": tree_flags("jetflow", head, 64)}
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        started = lambda name: stack.enter_context(serve(target, tmp_path / f"{name}.log", *bfloat16, *flags[name]))
        plain_server, tree_server = pool.map(started, flags)
        plain = generate(plain_server, requests)
        for at_once in (8, 1):
            found = differences(plain, generate(tree_server, requests, at_once))
            assert len(found) > 20 * len(plain) and max(found) < MOST and sum(found) / len(found) < MEAN
