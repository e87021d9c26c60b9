"""What a head is trained on: the frozen target's hidden states, its embedding and its LM head."""

from pathlib import Path

import torch
from torch import Tensor, nn

from sgl_specflow.errors import SpecflowConfigError


class FrozenTarget:
    """A Hugging Face causal LM, frozen, with the outputs of some decoder layers captured.

    Args:
        model: e.g. LlamaForCausalLM; its decoder layers are `model.model.layers`.
        layer_ids: decoder layers, from 0, whose outputs a head reads.
    """

    def __init__(self, model: nn.Module, layer_ids: tuple[int, ...]):
        self.model = model.eval().requires_grad_(False)
        self.embedding: Tensor = model.get_input_embeddings().weight
        self.lm_head: Tensor = model.get_output_embeddings().weight
        self._captured: dict[int, Tensor] = {}
        self._hooks = []
        self.capture(layer_ids)

    def capture(self, layer_ids: tuple[int, ...]) -> None:
        """Capture these layers instead."""
        for hook in self._hooks:
            hook.remove()
        self._captured.clear()
        self.layer_ids = tuple(layer_ids)
        self._hooks = [
            self.model.model.layers[layer].register_forward_hook(self._keep(layer)) for layer in self.layer_ids
        ]

    def _keep(self, layer: int):
        def hook(_module, _inputs, output):
            self._captured[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    @torch.no_grad()
    def states(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [B, T], padded on the right -> (layer outputs [B, T, L * H], final-normed hidden [B, T, H])."""
        final = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
        return torch.cat([self._captured[layer] for layer in self.layer_ids], dim=-1), final


def load_model(folder: str | Path, device: str | torch.device, dtype: str = "auto") -> nn.Module:
    """A Hugging Face causal LM on `device`; dtype "auto" is bfloat16 on CUDA, else float32."""
    import transformers

    if dtype == "auto":
        dtype = "bfloat16" if torch.device(device).type == "cuda" else "float32"
    return _loaded(transformers.AutoModelForCausalLM, folder, dtype=getattr(torch, dtype)).to(device)


def load_tokenizer(folder: str | Path):
    """The target's tokenizer."""
    import transformers

    return _loaded(transformers.AutoTokenizer, folder)


def _loaded(kind, folder: str | Path, **more):
    try:
        return kind.from_pretrained(folder, **more)
    except (OSError, ValueError) as error:
        raise SpecflowConfigError(
            given=f"the target {folder}, which transformers cannot load ({' '.join(str(error).split())})",
            allowed="the folder or hub id of a Hugging Face causal language model, with its tokenizer",
            todo="check the path",
        ) from error
