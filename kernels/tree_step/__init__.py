"""The small kernels of one step around the model passes: staging, likeliest tokens, tree building, acceptance."""

from sgl_specflow.kernels.tree_step.accept import Commit, accept_and_plan
from sgl_specflow.kernels.tree_step.best_tokens import best_tokens
from sgl_specflow.kernels.tree_step.force import force_path
from sgl_specflow.kernels.tree_step.stage import pack_rows, stage_bits, window_slots
from sgl_specflow.kernels.tree_step.tree_build import empty_tree, tree_from_marginals

__all__ = [
    "Commit",
    "accept_and_plan",
    "best_tokens",
    "empty_tree",
    "force_path",
    "pack_rows",
    "stage_bits",
    "tree_from_marginals",
    "window_slots",
]
