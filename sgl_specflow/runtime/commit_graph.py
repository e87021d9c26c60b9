"""Acceptance, KV compaction and the head's context in one CUDA graph a batch size.

Everything after the target's choice has fixed shapes: walking the trees, moving the accepted path's keys and values,
projecting its hidden states and writing the head's context. Its kernels become one launch from the host.
"""

from collections.abc import Callable, Sequence

import torch

from sgl_specflow.commit import CommitPlan
from sgl_specflow.kernels.tree_step import Commit, accept_and_plan, empty_tree
from sgl_specflow.tree import TokenTree, ancestor_bits
from sgl_specflow.verify import Accepted


def cuda_recorder() -> Callable[[Callable[[], None]], Callable[[], None]]:
    """A function that turns a body of device work into the replay of its CUDA graph. All share one memory pool of their
    own, so a body may leave results only in buffers that exist already."""
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def record(body):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.inference_mode():
            for _ in range(2):
                body()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                body()
        torch.cuda.current_stream().wait_stream(stream)
        return graph.replay

    return record


def commit_paths(
    tree: TokenTree,
    choice: torch.Tensor,
    depth: int,
    window: torch.Tensor,
    committed: torch.Tensor,
    hidden: torch.Tensor,
    move: Callable,
    write_context: Callable,
    out: Commit | None = None,
) -> Commit:
    """Accept a path of each tree, move its KV to the front of the window, write the head's context for it.

    tree to committed, and out, as `accept_and_plan` has them; hidden [at least R * B, L * H], a row a node; move and
    write_context as `CommitGraphs` has them.
    """
    commit = accept_and_plan(tree, choice, depth, window, committed, out)
    plan = commit.plan
    move(plan.destination.flatten(), plan.source.flatten())
    first_row = torch.arange(0, choice.numel(), tree.budget, device=choice.device)[:, None]
    rows = (first_row + plan.node).flatten()
    write_context(hidden[rows], plan.destination.flatten(), plan.position.flatten())
    return commit


class CommitGraphs:
    """Graphs of one worker. A batch is padded to the next captured size; padding requests commit onto slot 0, which
    SGLang's pools keep for such writes.

    Args:
        sizes: batch sizes to capture. budget: nodes of a tree. depth: the greatest depth.
        hidden: [at least max(sizes) * budget, L * H], where the target's graphs leave the hidden states.
        move: (destination, source), int64 of one length: SGLang's move of KV rows in the target's pool.
        write_context: (hidden rows, slots, positions): the head's context, `ParallelDrafter.write_context`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        budget: int,
        depth: int,
        hidden: torch.Tensor,
        move: Callable,
        write_context: Callable,
    ):
        most, device = max(sizes), hidden.device
        self._sizes, self._budget, self._depth = sorted(sizes), budget, depth
        self._hidden, self._move, self._write_context = hidden, move, write_context
        self._trees = empty_tree(most, budget, device)
        self._choice = torch.zeros(most, budget, dtype=torch.int64, device=device)
        self._window = torch.zeros(most, budget, dtype=torch.int64, device=device)
        self._committed = torch.zeros(most, dtype=torch.int64, device=device)
        self._commit = Commit.empty(most, depth + 1, device)
        self._reset_trees()
        self._replays: dict[int, Callable[[], None]] = {}

    def _reset_trees(self) -> None:
        """Before any batch: a root alone. Later a padding request repeats what an older batch left there, onto slot 0."""
        self._trees.token.zero_()
        self._trees.parent.fill_(-1)
        self._trees.depth.zero_()
        self._trees.ancestors.copy_(ancestor_bits(self._trees.parent))
        self._trees.node_count.fill_(1)

    def capture(self, record: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
        """Capture every size, the greatest first. record: from a function to its replay (`cuda_recorder`)."""
        for size in reversed(self._sizes):
            self._replays[size] = record(lambda size=size: self._body(size))

    def _body(self, size: int) -> None:
        commit_paths(
            self._trees.first(size),
            self._choice[:size],
            self._depth,
            self._window[:size],
            self._committed[:size],
            self._hidden,
            self._move,
            self._write_context,
            out=_first(self._commit, size),
        )

    def fits(self, requests: int) -> bool:
        return requests <= self._sizes[-1]

    def run(
        self, tree: TokenTree, choice: torch.Tensor, window: torch.Tensor, committed: torch.Tensor, hidden
    ) -> Commit:
        """Commit a batch of R requests; the result is in fresh tensors (its `plan` is not: it is not needed after).

        tree, choice int64 [R, B], window int64 [R, B] and committed int64 [R] as `accept_and_plan` has them; hidden
        [R * B, L * H].
        """
        requests = choice.shape[0]
        size = next(size for size in self._sizes if size >= requests)
        if hidden.data_ptr() != self._hidden.data_ptr():
            self._hidden[: requests * self._budget].copy_(hidden)
        trees = self._trees.first(requests)
        kept = [self._choice[:requests], self._window[:requests], self._committed[:requests]]
        torch._foreach_copy_(
            [*kept, trees.token, trees.parent, trees.depth],
            [choice, window, committed, tree.token, tree.parent, tree.depth],
        )
        trees.ancestors.copy_(tree.ancestors)
        if requests < size:
            self._window[requests:size].zero_()
        self._replays[size]()
        done = _first(self._commit, requests)
        accepted = done.accepted
        static = [accepted.path, accepted.length, accepted.tokens, accepted.bonus, accepted.last_node, done.new_length]
        fresh = [torch.empty_like(tensor) for tensor in static]
        torch._foreach_copy_(fresh, static)
        return Commit(Accepted(*fresh[:5]), done.plan, fresh[5])


def _first(commit: Commit, requests: int) -> Commit:
    return Commit(
        Accepted(**{name: value[:requests] for name, value in vars(commit.accepted).items()}),
        CommitPlan(**{name: value[:requests] for name, value in vars(commit.plan).items()}),
        commit.new_length[:requests],
    )
