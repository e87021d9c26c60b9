"""Servers for tests: a target small enough that any tree helps, heads for it, and requests sent at once."""

import json
import os
import shutil
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from injected import with_forked_children
from safetensors.torch import load_file, save_file
from sgl_specflow.launch.quickstart import EXACT_FLOAT32
from sgl_specflow.launch.server import Server, start
from tiny_models import save_random
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from weavers import random_weaver, weaver_config

from sgl_specflow.drafter.checkpoint import save_head
from sgl_specflow.drafter.config import HeadConfig
from sgl_specflow.drafter.make import head_config, random_tensors
from sgl_specflow.drafter.weaver import save_weaver

VOCABULARY = 16
LAYERS = 3
CONTEXT = 192
EOS = 1
BASE_FLAGS = ["--dtype", "float32", "--max-running-requests", "8", "--random-seed", "3", "--enable-metrics"]
BASE_FLAGS += ["--enable-custom-logit-processor"]
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
if torch.cuda.is_available():
    # Small pools and a large share: servers that start beside each other take memory from each other's view.
    BASE_FLAGS += ["--attention-backend", "triton", "--mem-fraction-static", "0.9", "--max-total-tokens", "20000"]
    BASE_FLAGS += ["--cuda-graph-max-bs-decode", "8"]
    BASE_FLAGS += ["--cuda-graph-backend-prefill", "disabled"]
    ENVIRONMENT |= EXACT_FLOAT32


# What all small targets have in common, and what those with experts or Gated Delta Net layers have besides.
SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=CONTEXT,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=EOS,
)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
SHARED_EXPERT = dict(EXPERTS, shared_expert_intermediate_size=48)
HYBRIDS = {
    "qwen3.5": (Qwen3_5TextConfig, {}),
    "qwen3.5-moe": (Qwen3_5MoeTextConfig, SHARED_EXPERT),
    "qwen3-next": (Qwen3NextConfig, SHARED_EXPERT),
}


def make_small_target(folder: Path, sharpness: float = 4.0, seed: int = 5, **changes) -> Path:
    """A Llama over 16 tokens: a tree of 64 nodes then holds every first token and many seconds, whatever the head says,
    so paths branch and are accepted without training. `sharpness` scales the logits; changes are of SHAPE."""
    return _save_small(LlamaConfig(**SHAPE | changes, num_hidden_layers=LAYERS), folder, sharpness, seed)


def make_small_moe_target(folder: Path, sharpness: float = 4.0, seed: int = 5) -> Path:
    """A Qwen3-MoE over the same 16 tokens: every layer sends each token to two of eight experts."""
    config = Qwen3MoeConfig(**SHAPE, **EXPERTS, num_hidden_layers=LAYERS, norm_topk_prob=True)
    return _save_small(config, folder, sharpness, seed)


def make_small_hybrid_target(
    folder: Path, kind: str = "qwen3.5", sharpness: float = 4.0, seed: int = 5, context: int = CONTEXT
) -> Path:
    """A model of HYBRIDS over the same 16 tokens: layers 0 and 2 are Gated Delta Net with two value heads a key head. Its
    decays differ from head to head and from token to token, so that a stale or a skipped state shows."""
    config_class, more = HYBRIDS[kind]
    config = config_class(
        **SHAPE | {"max_position_embeddings": context},
        **more,
        num_hidden_layers=4,
        full_attention_interval=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        mamba_ssm_dtype="float32",
    )
    folder = _save_small(config, folder, sharpness, seed)
    # The file that transformers writes names the layers' types alone.
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"full_attention_interval": 2}, indent=1))
    return folder


def _save_small(config, folder: Path, sharpness: float, seed: int) -> Path:
    _make_word_tokenizer(save_random(config, folder, seed, sharpness), VOCABULARY)
    return Path(folder)


def make_multimodal_twin(text_model: Path, folder: Path) -> Path:
    """The same language model as a checkpoint of the multimodal class, which is how Qwen3.5 and Qwen3.6 are published."""
    shutil.copytree(text_model, folder)
    weights = load_file(folder / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in weights.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    text["rope_parameters"] |= {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
    kind = text["model_type"].removesuffix("_text")
    vision = {"model_type": kind, "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64}
    config = {
        "architectures": [text["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")],
        "model_type": kind,
        "dtype": "float32",
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": vision | {"out_hidden_size": text["hidden_size"]},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return Path(folder)


def _make_word_tokenizer(folder: Path, vocabulary: int) -> None:
    """Tokens 2.. are the words 'w2', 'w3', ..."""
    words = ["<s>", "</s>"] + [f"w{i}" for i in range(2, vocabulary)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Sequence([decoders.Fuse()])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


def make_small_head(folder: Path, causal: bool, block_size: int = 8, confidence: float = 0.05, **changes) -> Path:
    """A random head of either kind for the small target. Its final norm is scaled by `confidence`: near 0 its marginals
    are flat and its trees wide, so that they help; at 1 it is sure of wrong tokens, and they do not."""
    config = dict(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCABULARY,
        num_target_layers=LAYERS,
        target_layer_ids=[0, 1],
        mask_token_id=VOCABULARY - 1,
        causal_head=causal,
        block_size=block_size,
        dtype="float32",
        max_position_embeddings=CONTEXT,
    )
    parsed = HeadConfig.from_dict(head_config(**{**config, **changes}))
    tensors = random_tensors(parsed, seed=2)
    tensors["norm.weight"] *= confidence
    save_head(folder, parsed, tensors)
    return Path(folder)


def make_small_weaver(folder: Path, strength: float = 0.1, **changes) -> Path:
    """A random Weaver for the small target and its bidirectional head. `strength` scales what it adds to the head's scores:
    small keeps the head's trees wide, yet different on every branch."""
    shape = dict(d_model=64, d_embed=64, d_rank=32, num_heads=2, K=7, candidate_pool_size=VOCABULARY)
    config = weaver_config(**{**shape, **changes})
    save_weaver(folder, config, random_weaver(config, seed=4, strength=strength, dtype=torch.float32))
    return Path(folder)


def weaver_options(weaver: Path, **more) -> dict[str, str]:
    """The environment that gives a server its Weaver."""
    return {"SGL_SPECFLOW_OPTIONS": json.dumps({"weaver": str(weaver), **more})}


def serve(
    target: Path, log: Path, *flags: str, environment: dict | None = None, timeout: float = 420, fork: bool = True
) -> Server:
    """A server of the target on a free port; the caller stops it. fork: on the CPU, `with_forked_children`."""
    environment = {**ENVIRONMENT, **(environment or {})}
    if fork and not torch.cuda.is_available():
        environment = with_forked_children(environment)
    return start(["--model-path", str(target), *BASE_FLAGS, *flags], log=log, environment=environment, timeout=timeout)


def tree_flags(algorithm: str, head: Path, budget: int, *more: str) -> list[str]:
    return [
        "--speculative-algorithm",
        algorithm,
        "--speculative-draft-model-path",
        str(head),
        "--speculative-num-draft-tokens",
        str(budget),
        *more,
    ]


def post(server: Server, path: str, body: dict, timeout: float = 300):
    """(status, parsed answer) of one POST."""
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"null")


def get(server: Server, path: str) -> str:
    with urllib.request.urlopen(server.url + path, timeout=60) as answer:
        return answer.read().decode()


def generate(server: Server, requests: list[dict], at_once: int = 8) -> list[dict]:
    """Answers of /generate in order, `at_once` requests in flight. Raises if one is not 200."""

    def one(body):
        status, answer = post(server, "/generate", body)
        assert status == 200, answer
        return answer

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, requests))


def outcome(answer: dict) -> tuple:
    """What must equal plain decoding's: tokens, text and why it ended."""
    return answer["output_ids"], answer["text"], answer["meta_info"]["finish_reason"]


def accept_length(answers: list[dict]) -> float:
    tokens = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    return tokens / max(1, sum(answer["meta_info"].get("spec_verify_ct", 0) for answer in answers))
