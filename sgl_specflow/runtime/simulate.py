"""Simulated acceptance (SGLANG_SIMULATE_ACC_LEN): honest step times for a full-size model without its weights.

With `--load-format dummy` no tree is ever accepted. SGLang's variable forces an accept length; a step then costs what
it costs at that length. The text is meaningless and no accept length may be reported from it.
"""

import torch
from sglang.srt.speculative.spec_utils import SIMULATE_ACC_LEN, SIMULATE_ACC_METHOD, sample_simulated_acc_len

from sgl_specflow.kernels.tree_step import force_path
from sgl_specflow.tree import TokenTree


def simulated_choice(tree: TokenTree, next_token: torch.Tensor) -> torch.Tensor:
    """next_token int64 [R, B] as it is, or, under the variable, changed so that the forced length is accepted."""
    if SIMULATE_ACC_LEN <= 0:
        return next_token
    return force_path(tree, sample_simulated_acc_len(SIMULATE_ACC_LEN, SIMULATE_ACC_METHOD, tree.budget))
