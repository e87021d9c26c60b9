"""The head inside SGLang's runtime drafts the trees that the plain-torch head drafts in float64.

Each drafted tree of a real server is written out with its request's tokens. Here the target's hidden states, the
head's pass and the tree are computed again in float64 from those tokens alone, so capture layers, context keys and
values (prefill, chunks, cached prefix, commit after every step), positions, block masks, windows and marginals all
have to be right for the trees to be equal.
"""

import json

import pytest
import torch
from injected import plugin_environment
from served import VOCABULARY, generate, make_small_head, make_small_target, make_small_weaver, serve, tree_flags
from test_serving_greedy import greedy, prompts
from transformers import AutoModelForCausalLM

from sgl_specflow.drafter.checkpoint import load_tensors
from sgl_specflow.drafter.config import HeadConfig
from sgl_specflow.drafter.reference import ReferenceHead
from sgl_specflow.drafter.weaver import FoldedWeaver, load_weaver
from sgl_specflow.training.target_states import FrozenTarget
from sgl_specflow.tree import TokenTree, build_tree, expansion_rounds, expansion_width
from sgl_specflow.tree.refresh import rebuild_tree, refresh_block

RECORDER = """
    import os, torch
    from sglang.srt.runtime_context import get_parallel

    def register():
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
        HookRegistry.register(
            "sgl_specflow.runtime.parallel_drafter.ParallelDrafter.draft", record, HookType.AFTER
        )

    def record(tree, drafter, batch, window, max_depth):
        assert drafter.context_writer.stacked is not None, "the context is written layer by layer"
        if get_parallel().tp_rank:
            return
        for i, req in enumerate(batch.reqs):
            committed = [*req.origin_input_ids, *req.output_ids]
            record.rows.append((committed, window.committed_length[i].item(), tree.token[i], tree.parent[i]))
        torch.save(record.rows, os.environ["TREES"])

    record.rows = []
"""

CASES = {
    # name: (algorithm, head changes, budget, flags, options)
    "causal": ("jetflow", {}, 24, ["--page-size", "16", "--chunked-prefill-size", "16"], None),
    "bidirectional": ("ddtree", {}, 24, [], None),
    "causal, shallow, narrow": (
        "jetflow",
        {},
        12,
        ["--speculative-num-steps", "4", "--speculative-eagle-topk", "5"],
        None,
    ),
    "sliding window": (
        "ddtree",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12},
        24,
        [],
        None,
    ),
    "path refresh": ("jetflow", {}, 24, [], {"path_refresh": True}),
    "two ranks": ("jetflow", {}, 24, ["--tp-size", "2"], None),
    "weaver, two ranks": ("dflash_tfm", {}, 20, ["--tp-size", "2"], {"weaver_width": 3, "weaver_rounds": 4}),
    "weaver, short of memory": (
        "dflash_tfm",
        {},
        20,
        ["--page-size", "16", "--chunked-prefill-size", "16", "--max-total-tokens", "256"],
        {"weaver_width": 3, "weaver_rounds": 4, "weaver_pool": 13, "weaver_temperature": 0.7},
    ),
}


@pytest.fixture(scope="module", params=CASES)
def recorded(request, tmp_path_factory):
    algorithm, changes, budget, flags, options = CASES[request.param]
    folder = tmp_path_factory.mktemp("drafter")
    target = make_small_target(folder / "target")
    head = make_small_head(folder / "head", causal=algorithm == "jetflow", confidence=0.3, **changes)
    environment = plugin_environment(folder / "plugin", RECORDER) | {"TREES": str(folder / "trees.pt")}
    if algorithm == "dflash_tfm":
        options = {"weaver": str(make_small_weaver(folder / "weaver", strength=1.0)), **options}
    if options:
        environment["SGL_SPECFLOW_OPTIONS"] = json.dumps(options)
    shared = prompts(1, seed=30, longest=50)[0] + [3] * 20
    requests = [greedy(ids, 16) for ids in [*prompts(4, seed=31), shared + [4, 5], shared + [6]]]
    flags_of_all = tree_flags(algorithm, head, budget, *flags)
    # Plugins of two ranks: loaded by each process for itself.
    fork = request.param != "two ranks"
    with serve(target, folder / "log", *flags_of_all, environment=environment, fork=fork) as server:
        generate(server, requests, at_once=3)
    rows = torch.load(folder / "trees.pt")
    assert len(rows) > 40
    if "--max-total-tokens" in flags:
        assert "retract" in (folder / "log").read_text().lower()
    return target, head, budget, flags, options or {}, rows


def reference_tree(
    target: FrozenTarget,
    head: ReferenceHead,
    weaver: FoldedWeaver | None,
    committed: list[int],
    budget: int,
    depth: int,
    width: int,
    options: dict,
) -> TokenTree:
    config = head.config
    tokens = torch.tensor(committed)
    states, final = (out[0] for out in target.states(tokens[None, :-1]))
    refresh = "path_refresh" in options
    length = len(committed) - 1
    context = head.context_kv(head.project_context(states), torch.arange(length))

    def log_probs(hidden):
        return (hidden @ target.lm_head.T).log_softmax(-1)

    def block(ids, depths, mask=None):
        return head.forward(target.embedding[ids], length + depths, context, block_mask=mask)

    size = depth + 1 if config.causal_head else min(config.block_size, budget)
    ids = torch.full((size,), config.mask_token_id)
    ids[0] = tokens[-1]
    drafted = block(ids, torch.arange(size))[1:]
    if weaver:
        pool = log_probs(drafted[:depth]).topk(options.get("weaver_pool", VOCABULARY), dim=-1)
        inputs = (tokens[-1:], final[-1:], drafted[None], pool.indices[None], pool.values[None])
        simultaneous, temperature = (
            options.get("weaver_width") or expansion_width(budget),
            options.get("weaver_temperature", 1.0),
        )
        rounds = options.get("weaver_rounds") or expansion_rounds(budget, simultaneous)
        return weaver.build_tree(*inputs, budget, simultaneous, rounds, width, temperature)
    best = log_probs(drafted[:depth]).topk(width, dim=-1)
    first = budget // 2 if refresh else budget
    tree = build_tree(tokens[-1:], best.values[None].float(), best.indices[None], first)
    if not refresh:
        return tree
    ids, depths, bits = refresh_block(tree, config.mask_token_id)
    mask = TokenTree(ids, ids, depths, bits, ids[0]).ancestor_mask()[0]
    behind = log_probs(block(ids[0], depths[0], mask)[first:])
    own = behind[tree.parent[0].clamp(min=0)].gather(1, tree.token[0][:, None])[:, 0]
    best = behind.topk(width, dim=-1)
    return rebuild_tree(tree, own[None].float(), best.values[None].float(), best.indices[None], budget, depth)


def test_served_trees_are_the_reference_trees(recorded):
    target_folder, head_folder, budget, flags, options, rows = recorded
    config = HeadConfig.load(head_folder)
    head = ReferenceHead(config, load_tensors(head_folder, torch.float64))
    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float64)
    target = FrozenTarget(model, config.target_layer_ids)
    weaver = None
    if "weaver" in options:
        loaded = load_weaver(options["weaver"])
        weaver = FoldedWeaver(*loaded, target.embedding, target.lm_head, torch.float64)
    depth = int(flags[flags.index("--speculative-num-steps") + 1]) if "--speculative-num-steps" in flags else 7
    width = int(flags[flags.index("--speculative-eagle-topk") + 1]) if "--speculative-eagle-topk" in flags else 16
    equal = 0
    for committed, length, token, parent in rows:
        assert length == len(committed) - 1
        expected = reference_tree(target, head, weaver, committed, budget, depth, width, options)
        expected.check()
        equal += bool((expected.token[0] == token).all() and (expected.parent[0] == parent).all())
    # A float32 score may swap two near-equal nodes; anything wrong in the pass changes nearly every tree.
    assert equal >= 0.97 * len(rows), f"{equal} of {len(rows)} trees are equal"
