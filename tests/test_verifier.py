"""What the verifier does to logits beside SGLang's own functions."""

from types import SimpleNamespace

import pytest
import torch

from sgl_specflow.runtime.verifier import _apply_mask


def bits(allowed: torch.Tensor) -> torch.Tensor:
    """xgrammar's form of bool [rows, 16]: int32 [rows, 1]."""
    return (allowed.int() << torch.arange(16, device=allowed.device)).sum(1, dtype=torch.int32, keepdim=True)


def densely(logits: torch.Tensor, bitmask: torch.Tensor) -> None:
    """What `apply_token_bitmask_inplace_triton` writes: a row begins where the one before ends."""
    denied = ((bitmask >> torch.arange(16)) & 1) == 0
    logits.as_strided((denied.numel(),), (1,), logits.storage_offset())[denied.flatten()] = -torch.inf


def assert_masked(apply, device):
    allowed = torch.rand(5, 16, generator=torch.Generator().manual_seed(2)).to(device) < 0.5
    given = torch.arange(5 * 64.0, device=device).view(5, 64)
    for width in (16, 64):  # rows that lie apart, and dense ones
        storage = given.clone() if width == 64 else given[:, :16].clone()
        logits, padding = storage[:, :16], storage[:, 16:].clone()
        _apply_mask(SimpleNamespace(apply=lambda rows: apply(rows, bits(allowed))), logits)
        assert torch.equal(logits, given[:, :16].masked_fill(~allowed, -torch.inf))
        assert torch.equal(storage[:, 16:], padding)


def test_a_grammars_mask_reaches_rows_that_lie_apart():
    assert_masked(densely, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_grammars_mask_on_the_gpu():
    from sglang.kernels.ops.grammar.bitmask_ops import apply_token_bitmask_inplace_triton

    assert_masked(apply_token_bitmask_inplace_triton, "cuda")
