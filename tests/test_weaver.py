"""The Weaver in float64: who sees whom, what competes with what, files and their refusals, and the fast construction."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from sgl_specflow.eval import weaver as weaver_benchmark
from sgl_specflow.eval.shapes import WEAVER_27B
from test_conditional_tree import paths_of
from weavers import random_weaver, weaver_config

from sgl_specflow.drafter.config import HeadConfig
from sgl_specflow.drafter.make import head_config
from sgl_specflow.drafter.weaver import FoldedWeaver, ReferenceWeaver, WeaverConfig, load_weaver, save_weaver
from sgl_specflow.drafter.weaver.checkpoint import expected_shapes, find_weaver, load_weaver_config
from sgl_specflow.errors import SpecflowConfigError
from sgl_specflow.tree import build_conditional_tree

VOCABULARY = 50


@pytest.fixture(scope="module")
def case():
    """A config, its tensors, a target's two ends and one step's inputs for 3 requests, in float64."""
    torch.manual_seed(1)
    config = weaver_config()
    embedding, lm_head = torch.randn(VOCABULARY, 20).double(), torch.randn(VOCABULARY, 24).double() / 5
    anchor = torch.randint(0, VOCABULARY, (3,))
    committed, proposal = torch.randn(3, 24).double(), torch.randn(3, 7, 24).double()
    pool_scores, pool_tokens = (proposal @ lm_head.T).topk(config.candidate_pool_size, dim=-1)
    return config, random_weaver(config), embedding, lm_head, anchor, committed, proposal, pool_tokens, pool_scores


# --- the reference --------------------------------------------------------------------------------------------------


def random_nodes(seed=2, count=9):
    """A random tree a request: (tokens, depth, ancestor mask), all [3, count]."""
    torch.manual_seed(seed)
    tokens, depth = torch.randint(0, VOCABULARY, (3, count)), torch.zeros(3, count, dtype=torch.int64)
    mask = torch.eye(count, dtype=torch.bool).repeat(3, 1, 1)
    for request in range(3):
        for node in range(1, count):
            parent = torch.randint(0, node, ()).item()
            depth[request, node] = depth[request, parent] + 1
            mask[request, node] |= mask[request, parent]
    return tokens, depth, mask


def states(case, tokens, depth, mask, committed=None, proposal=None):
    config, tensors, embedding, _, _, own_committed, own_proposal, *_ = case
    return ReferenceWeaver(config, tensors).node_states(
        own_committed if committed is None else committed,
        own_proposal if proposal is None else proposal,
        embedding[tokens],
        depth,
        mask,
    )


def test_a_node_sees_its_ancestors_and_itself_and_no_other_node(case):
    tokens, depth, mask = random_nodes()
    before = states(case, tokens, depth, mask)
    for node in range(tokens.shape[1]):
        changed = tokens.clone()
        changed[:, node] = (changed[:, node] + 1) % VOCABULARY
        same = (states(case, changed, depth, mask) == before).all(-1)
        assert torch.equal(same, ~mask[:, :, node])


def test_a_node_sees_the_whole_prefix(case):
    tokens, depth, mask = random_nodes()
    before = states(case, tokens, depth, mask)
    committed, proposal = case[5], case[6]
    assert not (states(case, tokens, depth, mask, committed=committed + 0.1) == before).all(-1).any()
    for row in range(proposal.shape[1]):
        changed = proposal.clone()
        changed[:, row, 0] += 0.1
        assert not (states(case, tokens, depth, mask, proposal=changed) == before).all(-1).any()


def test_the_prefix_is_causal(case):
    """A prefix entry's keys and values do not depend on later ones: with attention to the last cut off in the last
    layer alone, changing it must not matter. Seen from outside: in one layer, a node that may not see entry j."""
    config, tensors, *_, committed, proposal, _, _ = case
    weaver = ReferenceWeaver(config, tensors)
    seen = []
    original = weaver._attention

    def keep(block, x, cos, sin, mask):
        seen.append((x.clone(), mask.clone()))
        return original(block, x, cos, sin, mask)

    weaver._attention = keep
    tokens, depth, mask = random_nodes()
    changed = proposal.clone()
    changed[:, 4] += 0.5
    weaver.node_states(committed, proposal, case[2][tokens], depth, mask)
    weaver.node_states(committed, changed, case[2][tokens], depth, mask)
    layers = config.num_layers
    for layer in range(layers):
        same = (seen[layer][0] == seen[layers + layer][0]).all(-1)[:, :8]
        # Entry 0 is the committed hidden state, so proposal row 4 is entry 5.
        assert same[:, :5].all() and not same[:, 5].any() and (layer == 0 or not same[:, 5:].any())


def test_positions_are_those_of_the_specification(case):
    """Rotary scores depend on differences only, so shifting all node positions alone must change the states, and an
    independent per-node computation of the first layer must agree."""
    config, tensors, embedding, _, _, committed, proposal, *_ = case
    tokens, depth, mask = random_nodes()
    shallow = ReferenceWeaver(weaver_config(num_layers=1), {n: t for n, t in tensors.items() if "blocks.1" not in n})
    got = shallow.node_states(committed, proposal, embedding[tokens], depth, mask)

    def norm(x, name):
        return x / (x.square().mean() + 1e-6).sqrt() * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    def turned(x, position):
        pairs = x.view(4, 2, 4)
        angle = position * 10000.0 ** (-torch.arange(0, 8, 2).double() / 8)
        turn = torch.polar(torch.ones(4).double(), angle)
        both = torch.complex(pairs[:, 0], pairs[:, 1]) * turn
        return torch.cat((both.real, both.imag), dim=1)

    def entry(hidden, norm_name, linear, position):
        x = tensors[f"{linear}.weight"] @ norm(hidden, norm_name) + tensors[f"{linear}.bias"]
        q, k, v = (tensors["blocks.0.qkv_proj.weight"] @ norm(x, "blocks.0.norm_attn")).view(3, 4, 8)
        return x, turned(q, position), turned(k, position), v

    for request in range(3):
        prefix = [
            entry(h, "output_norm", "proposal_in", i) for i, h in enumerate([committed[request], *proposal[request]])
        ]
        nodes = [
            entry(embedding[t], "embed_norm", "token_in", d.item() + 1) for t, d in zip(tokens[request], depth[request])
        ]
        for i, (x, q, _, _) in enumerate(nodes):
            sees = prefix + [nodes[j] for j in range(len(nodes)) if mask[request, i, j]]
            weights = torch.stack([(q * k).sum(1) / 8**0.5 for _, _, k, _ in sees]).softmax(0)
            mixed = sum(w[:, None] * v for w, (_, _, _, v) in zip(weights, sees))
            x = x + tensors["blocks.0.o_proj.weight"] @ mixed.flatten()
            inner = tensors["blocks.0.gate_up_proj.weight"] @ norm(x, "blocks.0.norm_mlp")
            inner = inner + tensors["blocks.0.gate_up_proj.bias"]
            gate, up = inner[:40], inner[40:]  # gate rows first
            x = x + tensors["blocks.0.down_proj.weight"] @ (gate * gate.sigmoid() * up)
            x = x + tensors["blocks.0.down_proj.bias"]
            torch.testing.assert_close(got[request, i], x)


# --- the construction -----------------------------------------------------------------------------------------------


def folded(case, dtype=torch.float64, embedding=None, lm_head=None):
    config, tensors, own_embedding, own_head, *_ = case
    return FoldedWeaver(
        config,
        tensors,
        (own_embedding if embedding is None else embedding).to(dtype),
        (own_head if lm_head is None else lm_head).to(dtype),
        dtype,
    )


def reference_tree(case, budget, width, rounds, children, temperature=1.0, max_depth=None):
    """The tree with every node's log-probabilities from the reference, over whole paths, nothing remembered."""
    config, tensors, embedding, lm_head, anchor, committed, proposal, pool_tokens, pool_scores = case
    weaver = ReferenceWeaver(config, tensors)
    requests = len(anchor)
    paths = [[] for _ in range(requests)]

    def log_probs(nodes):
        out = torch.empty(requests, nodes.token.shape[1], pool_tokens.shape[2])
        for r in range(requests):
            for i, token in enumerate(nodes.token[r].tolist()):
                above = paths[r][nodes.parent[r, i]] if nodes.depth[r, i] else []
                path = [*above, token][: config.depth]
                paths[r].append(path)
                depth = torch.arange(len(path))[None]
                chain = torch.ones(1, len(path), len(path), dtype=torch.bool).tril()
                state = weaver.node_states(
                    committed[r : r + 1], proposal[r : r + 1], embedding[torch.tensor([path])], depth, chain
                )[:, -1:]
                level = len(path) - 1
                logits = weaver.pool_logits(state, pool_scores[r, level], lm_head[pool_tokens[r, level]][None, None])
                out[r, i] = (logits[0, 0] / temperature).log_softmax(-1)
        return out

    marginals = (pool_scores / temperature).log_softmax(-1).float()
    return build_conditional_tree(anchor, pool_tokens, marginals, log_probs, budget, width, rounds, children, max_depth)


@pytest.mark.parametrize(
    "budget, width, rounds, children, temperature, limits",
    [
        (1, 8, 1, 4, 1.0, None),
        (24, 1, 23, 12, 1.0, None),
        (33, 8, 4, 12, 1.0, [0, 2, 7]),
        (40, 5, 3, 6, 0.5, None),
        (64, 16, 2, 12, 2.0, None),
        (20, 20, 1, 12, 1.0, None),
    ],
)
def test_the_construction_grows_the_reference_tree(case, budget, width, rounds, children, temperature, limits):
    *_, anchor, committed, proposal, pool_tokens, pool_scores = case
    limits = None if limits is None else torch.tensor(limits)
    tree = folded(case).build_tree(
        anchor, committed, proposal, pool_tokens, pool_scores, budget, width, rounds, children, temperature, limits
    )
    tree.check()
    expected = reference_tree(case, budget, width, rounds, children, temperature, limits)
    for name in ("token", "parent", "depth", "ancestors", "node_count"):
        assert torch.equal(getattr(tree, name), getattr(expected, name)), name


def test_a_branch_changes_its_childrens_order(case):
    """Conditional: somewhere two nodes of one depth have differently ordered children."""
    *_, anchor, committed, proposal, pool_tokens, pool_scores = case
    tree = folded(case).build_tree(anchor, committed, proposal, pool_tokens, pool_scores, 200, 8, 25, 12)
    first_child = {}
    for path in paths_of(tree, 0):
        first_child.setdefault(path[:-1], path[-1])
    by_depth = {}
    for path, token in first_child.items():
        by_depth.setdefault(len(path), set()).add(token)
    assert any(len(tokens) > 1 for tokens in by_depth.values())


def test_only_the_pools_rows_of_the_vocabulary_matter(case):
    """Whatever the LM head and embedding hold outside the pools (and the anchor) never reaches the tree: nothing is
    projected to the whole vocabulary. NaN there would poison any full projection."""
    anchor, committed, proposal, pool_tokens, pool_scores = (tensor[:1] for tensor in case[4:])
    pool_tokens, pool_scores = pool_tokens[:, :2], pool_scores[:, :2]
    outside = torch.ones(VOCABULARY, dtype=torch.bool)
    outside[pool_tokens.flatten()] = False
    assert outside.any()
    lm_head = case[3].clone()
    lm_head[outside] = torch.nan
    outside[anchor] = False
    embedding = case[2].clone()
    embedding[outside] = torch.nan
    inputs = (anchor, committed, proposal, pool_tokens, pool_scores, 40, 8, 3, 12)
    tree, plain = (
        folded(case, embedding=embedding, lm_head=lm_head).build_tree(*inputs),
        folded(case).build_tree(*inputs),
    )
    assert torch.equal(tree.token, plain.token) and torch.equal(tree.parent, plain.parent)
    assert all(
        set(path[i + 1 : i + 2]) <= set(pool_tokens[0, i].tolist()) for path in paths_of(tree, 0) for i in range(2)
    )


def test_a_request_is_drafted_alike_alone_and_in_a_batch(case):
    weaver, inputs = folded(case), case[4:]
    together = weaver.build_tree(*inputs, 48, 8, 3, 12)
    for r in range(3):
        alone = weaver.build_tree(*(tensor[r : r + 1] for tensor in inputs), 48, 8, 3, 12)
        assert torch.equal(alone.token[0], together.token[r]) and torch.equal(alone.parent[0], together.parent[r])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_construction_runs_in_serving_dtypes(case, dtype):
    *_, anchor, committed, proposal, pool_tokens, pool_scores = case
    inputs = (anchor, committed.to(dtype), proposal.to(dtype), pool_tokens, pool_scores.float())
    tree = folded(case, dtype).build_tree(*inputs, 32, 8, 3, 12)
    tree.check()
    if dtype == torch.float32:
        assert torch.equal(tree.token, reference_tree(case, 32, 8, 3, 12).token)


def test_a_shallower_tree_reads_a_shorter_prefix_and_fewer_pools(case):
    *_, anchor, committed, proposal, pool_tokens, pool_scores = case
    tree = folded(case).build_tree(
        anchor, committed, proposal[:, :5], pool_tokens[:, :3], pool_scores[:, :3], 30, 4, 5, 12
    )
    tree.check()
    assert tree.depth.max() == 3


def test_the_benchmarks_shape_has_the_published_size():
    shapes = expected_shapes(WEAVER_27B).values()
    assert round(sum(torch.Size(shape).numel() for shape in shapes) / 1e6, 1) == 56.7


def test_the_benchmark_states_each_rows_implementation_and_the_default_widths_share(monkeypatch, tmp_path):
    weaver = lambda config, vocabulary, device, dtype, kind: SimpleNamespace(build_tree=lambda *inputs: kind)
    monkeypatch.setattr(weaver_benchmark, "need_gpu", lambda parser: None)
    monkeypatch.setattr(weaver_benchmark, "make_weaver", weaver)
    monkeypatch.setattr(weaver_benchmark, "make_inputs", lambda *arguments: ())
    monkeypatch.setattr(weaver_benchmark, "microseconds", lambda calls: {"triton": 5.0, "cuda": 4.0}[calls[0]()])
    out = tmp_path / "rows.json"
    shape = ["--budgets", "64", "--widths", "8", "32", "--batches", "1", "--step-ms", "1:64:0.01"]
    weaver_benchmark.main([*shape, "--implementations", "triton,cuda", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    figures = [(row["implementation"], row["width"], row["rounds"], row["construct_us"], row["share"]) for row in rows]
    ours = [
        ("triton", 8, 8, 5.0, None),
        ("triton", 32, 2, 5.0, 0.5),
        ("cuda", 8, 8, 4.0, None),
        ("cuda", 32, 2, 4.0, 0.4),
    ]
    assert figures == ours


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA is not available")
@pytest.mark.parametrize("implementation, dtype", [("triton", torch.float32), ("cuda", torch.bfloat16)], ids=str)
def test_a_cuda_graph_holds_the_whole_construction(implementation, dtype):
    """Captured once and replayed on other inputs: the trees of a plain run, and all but a few nodes of the plain pieces'."""
    config = weaver_config(d_model=128, d_embed=128, d_rank=128)
    weaver, plain = (
        weaver_benchmark.make_weaver(config, 500, "cuda", dtype, kind) for kind in (implementation, "torch")
    )
    first, second = (weaver_benchmark.make_inputs(config, 500, 3, "cuda", dtype) for _ in range(2))
    held = tuple(tensor.clone() for tensor in first)
    with torch.cuda.stream(torch.cuda.Stream()):
        weaver.build_tree(*held, 64, 8, 4, 12)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tree = weaver.build_tree(*held, 64, 8, 4, 12)
    for inputs in (first, second):
        for place, tensor in zip(held, inputs):
            place.copy_(tensor)
        graph.replay()
        expected = weaver.build_tree(*inputs, 64, 8, 4, 12)
        expected.check()
        assert torch.equal(tree.token, expected.token) and torch.equal(tree.parent, expected.parent)
        assert_nearly_the_same_paths(expected, plain.build_tree(*inputs, 64, 8, 4, 12))


def assert_nearly_the_same_paths(tree, other):
    for request in range(len(tree.token)):
        ours, others = (set(paths_of(part, request)) for part in (tree, other))
        assert len(ours & others) >= 0.9 * len(ours)


# --- files ----------------------------------------------------------------------------------------------------------


def tensors_equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_our_export_and_the_public_file_hold_the_same_weaver(tmp_path):
    config = weaver_config()
    tensors = random_weaver(config, dtype=torch.float32)
    save_weaver(tmp_path / "ours", config, tensors)
    public = dict(config.to_dict(), encoder_mode=3, score_head=4, activation="swiglu")
    torch.save({"config": public, "state_dict": tensors, "metadata": {"step": 3}}, tmp_path / "weaver.pt")
    (tmp_path / "hub").mkdir()
    os.link(tmp_path / "weaver.pt", tmp_path / "hub" / "weaver.pt")
    for place in ("ours", "weaver.pt", "hub"):
        path = find_weaver(tmp_path / place)
        read, stored = load_weaver(path)
        assert read == config == load_weaver_config(path) and tensors_equal(stored, tensors)
    assert load_weaver(tmp_path / "ours", torch.bfloat16)[1]["token_in.weight"].dtype == torch.bfloat16


def test_shards_stay_under_16_mb(tmp_path):
    config = weaver_config(d_rank=512, num_heads=8, mlp_dim=1408, num_layers=3, d_model=576, d_embed=576)
    save_weaver(tmp_path, config, random_weaver(config, dtype=torch.bfloat16))
    sizes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    assert len(sizes) > 1 and max(sizes) < 16 * 10**6 and sum(sizes) < 30 * 10**6
    assert load_weaver_config(find_weaver(tmp_path)) == config


class WantsCode:
    def __reduce__(self):
        return os.system, ("true",)


BAD_CONFIGS = {
    "d_rank": {"d_rank": 0},
    "num_layers 'x'": {"num_layers": "x"},
    "K True": {"K": True},
    "unknown keys dropout": {"dropout": 0.1},
    "encoder_mode 2": {"encoder_mode": 2},
    "activation 'gelu'": {"activation": "gelu"},
    "rope_base -1": {"rope_base": -1},
    "rope_base inf": {"rope_base": float("inf")},
    "rope_base 1000": {"rope_base": 10**400},
    "encoder_mode tensor": {"encoder_mode": torch.tensor([3, 3])},
    "num_heads 3": {"num_heads": 3},
}


@pytest.mark.parametrize("named", BAD_CONFIGS)
def test_a_config_is_refused_by_the_name_of_its_key(named):
    with pytest.raises(SpecflowConfigError, match=named):
        weaver_config(**BAD_CONFIGS[named])


@pytest.mark.parametrize(
    "key", ["d_model", "d_embed", "d_rank", "num_layers", "num_heads", "mlp_dim", "K", "candidate_pool_size"]
)
def test_a_missing_key_is_named(key):
    raw = weaver_config().to_dict()
    del raw[key]
    with pytest.raises(SpecflowConfigError, match=f"{key} None"):
        WeaverConfig.from_dict(raw)


def bad_file(path, how):
    config = weaver_config()
    tensors = random_weaver(config, dtype=torch.float32)
    payload = {"config": config.to_dict(), "state_dict": tensors}
    if how == "code":
        payload["config"] = WantsCode()
    elif how == "no state":
        del payload["state_dict"]
    elif how == "missing tensor":
        del tensors["out_norm.bias"]
    elif how == "older layout":
        tensors["pos_emb"] = torch.zeros(7, 32)
    elif how == "wrong shape":
        tensors["blocks.1.down_proj.weight"] = torch.zeros(3, 3)
    elif how == "whole numbers":
        tensors["out_norm.bias"] = tensors["out_norm.bias"].long()
    elif how == "sparse":
        tensors["token_in.weight"] = tensors["token_in.weight"].to_sparse()
    elif how == "empty":
        tensors["out_norm.bias"] = tensors["out_norm.bias"].to("meta")
    elif how == "no tensor":
        tensors["out_norm.bias"] = 3
    torch.save(payload, path)
    if how == "cut off":
        path.write_bytes(path.read_bytes()[:500])
    elif how == "text":
        path.write_text("not a checkpoint")


BAD_FILES = {
    "code": "wants code run",
    "no state": "which is no Weaver",
    "missing tensor": "missing out_norm.bias",
    "older layout": "unexpected pos_emb",
    "wrong shape": "blocks.1.down_proj.weight is",
    "whole numbers": "out_norm.bias are no dense floating-point weights",
    "sparse": "token_in.weight are no dense floating-point weights",
    "empty": "out_norm.bias are no dense floating-point weights",
    "no tensor": "no tensor at out_norm.bias",
    "cut off": "cannot be read|no torch file",
    "text": "no torch file",
}


@pytest.mark.parametrize("how", BAD_FILES)
def test_a_file_that_is_no_weaver_is_refused(tmp_path, how):
    bad_file(tmp_path / "weaver.pt", how)
    with pytest.raises(SpecflowConfigError, match=BAD_FILES[how]) as error:
        load_weaver_config(find_weaver(tmp_path / "weaver.pt"))
    assert "weaver.pt" in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_finite_numbers_are_refused(tmp_path, value):
    """From a NaN on, every score is dead: trees would be their root alone, and nobody told."""
    config = weaver_config()
    tensors = random_weaver(config, dtype=torch.float32)
    tensors["blocks.1.o_proj.weight"][3, 4] = value
    save_weaver(tmp_path / "ours", config, tensors)
    torch.save({"config": config.to_dict(), "state_dict": tensors}, tmp_path / "weaver.pt")
    for place in ("ours", "weaver.pt"):
        with pytest.raises(SpecflowConfigError, match="no finite numbers in blocks.1.o_proj.weight"):
            load_weaver(tmp_path / place)


def test_paths_that_hold_no_weaver_are_refused(tmp_path):
    for path in (tmp_path / "nothing", tmp_path, "./x/y", "~nobody-of-that-name/x", "x" * 5000, "/" + "x" * 5000):
        with pytest.raises(SpecflowConfigError, match="Weaver"):
            find_weaver(path)
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(SpecflowConfigError, match="config.json"):
        load_weaver_config(find_weaver(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(weaver_config().to_dict()))
    with pytest.raises(SpecflowConfigError, match="cut off or broken"):
        load_weaver_config(find_weaver(tmp_path))


def head(**changes):
    given = dict(
        hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        vocab_size=VOCABULARY, num_target_layers=2, target_layer_ids=[0], mask_token_id=3, causal_head=False, block_size=8,
    )  # fmt: skip
    return HeadConfig.from_dict(head_config(**{**given, **changes}))


@pytest.mark.parametrize(
    "changes, embedding_size, named",
    [
        ({}, 21, "d_embed 20"),
        ({"hidden_size": 32}, 20, "d_model 24"),
        ({"block_size": 7}, 20, "K 7, the head predicts 6"),
        ({"vocab_size": 11, "mask_token_id": 3}, 20, "candidate_pool_size 12"),
        ({"causal_head": True}, 20, "the head is causal"),
    ],
)
def test_a_weaver_for_another_head_is_refused(changes, embedding_size, named):
    weaver_config().check_against(head(), 20)
    with pytest.raises(SpecflowConfigError, match=named):
        weaver_config().check_against(head(**changes), embedding_size)
