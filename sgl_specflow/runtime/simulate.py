"""Simulated acceptance (SGLANG_SIMULATE_ACC_LEN): honest step times for a full-size model without its weights.

With `--load-format dummy` no tree is ever accepted. SGLang's variable forces an accept length; a step then costs what
it costs at that length. The text is meaningless and no accept length may be reported from it.
"""

import torch
from sglang.srt.speculative.spec_utils import SIMULATE_ACC_LEN, SIMULATE_ACC_METHOD, sample_simulated_acc_len

from sgl_specflow.tree import TokenTree


def simulated_choice(tree: TokenTree, next_token: torch.Tensor) -> torch.Tensor:
    """next_token int64 [R, B] as it is, or, under the variable, changed so that the forced length is accepted: the
    target 'chooses' the tree's deepest path down to that length and nothing below."""
    if SIMULATE_ACC_LEN <= 0:
        return next_token
    length = sample_simulated_acc_len(SIMULATE_ACC_LEN, SIMULATE_ACC_METHOD, tree.budget)
    deepest = tree.depth.argmax(1)
    on_path = tree.ancestor_mask().gather(1, deepest[:, None, None].expand(-1, 1, tree.budget))[:, 0]
    on_path = on_path & (tree.depth < length) & (tree.parent >= 0)
    # -1 is no token: it matches no child. The bonus token must be one, so the last path node keeps token 0's choice.
    chosen = torch.full_like(next_token, -1)
    parent = torch.where(on_path, tree.parent, tree.budget)
    chosen = torch.nn.functional.pad(chosen, (0, 1)).scatter(1, parent, tree.token)[:, : tree.budget]
    return torch.where(chosen < 0, _token_of_no_child(tree), chosen)


def _token_of_no_child(tree: TokenTree) -> torch.Tensor:
    """int64 [R, 1], a token that no node of the tree carries: the smallest missing one of 0..B."""
    requests = tree.token.shape[0]
    present = torch.zeros(requests, tree.budget + 2, dtype=torch.bool, device=tree.token.device)
    present.scatter_(1, tree.token.clamp(max=tree.budget + 1), True)
    return (~present[:, : tree.budget + 1]).to(torch.int8).argmax(1, keepdim=True)
