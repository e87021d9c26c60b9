"""Linear layers with FP8 weights: quantisation, the product, and what the draft head makes of it."""

import pytest
import torch
from interpreted import INTERPRETING, run_interpreted
from sgl_specflow.kernels.fp8_linear import FP8, dequantise_rows, fp8_linear, quantise_rows

from sgl_specflow.errors import SpecflowConfigError
from sgl_specflow.runtime.fp8_draft import quantise_head

CASES = [(1, 40, 64), (15, 100, 256), (16, 33, 300), (150, 48, 128)]  # rows, features, depth


def matrix(features: int, depth: int, seed: int = 0) -> torch.Tensor:
    """Rows of very different size, as trained matrices have them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(features, depth, generator=generator) * torch.logspace(-4, 2, features)[:, None]


def gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETING, reason="needs CUDA")(test))


def test_a_row_is_rounded_relative_to_its_own_size():
    weight = matrix(9, 500)
    weight[3] = 0.0
    quantised, scale = quantise_rows(weight)
    assert quantised.dtype == FP8 and scale.shape == (9,)
    back = dequantise_rows(quantised, scale, torch.float32)
    assert torch.equal(back[3], torch.zeros(500))
    largest = weight.abs().amax(1, keepdim=True)
    # e4m3 has three bits behind the point; below 2^-6 of its range its steps are equal, 2^-9.
    allowed = torch.maximum(weight.abs() / 16, largest * 2**-9 / 448)
    assert ((back - weight).abs() <= allowed + 1e-12).all()
    assert ((back - weight).abs() > 0).any()


def check_product(case, device, dtype=torch.bfloat16):
    rows, features, depth = case
    x = torch.randn(rows, depth, generator=torch.Generator().manual_seed(1)).to(dtype)
    quantised, scale = quantise_rows(matrix(features, depth))
    out = fp8_linear(x.to(device), quantised.to(device), scale.to(device))
    exact = x.double() @ (quantised.double() * scale.double()[:, None]).T
    assert out.dtype == dtype and out.shape == (rows, features)
    size = x.double().norm(dim=1)[:, None] * (quantised.double() * scale.double()[:, None]).norm(dim=1)
    assert ((out.cpu().double() - exact).abs() <= 0.01 * size).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_product(case):
    # Triton's interpreter multiplies no bfloat16.
    check_product(case, "cpu", torch.float16 if INTERPRETING else torch.bfloat16)


@gpu
@pytest.mark.parametrize("case", [*CASES, (15, 4096, 12288), (15, 151936, 1024), (300, 100, 256)], ids=str)
def test_product_on_the_gpu(case):
    check_product(case, "cuda")


def test_wrong_shapes_are_refused_by_name():
    quantised, scale = quantise_rows(matrix(8, 32))
    with pytest.raises(ValueError, match="wants weight float8_e4m3fn"):
        fp8_linear(torch.zeros(2, 31), quantised, scale)
    with pytest.raises(ValueError, match=r"scale \[N\]"):
        fp8_linear(torch.zeros(2, 32), quantised, scale[:5])


@pytest.mark.skipif(INTERPRETING, reason="this is the child process")
def test_the_triton_kernel_holds_in_the_interpreter():
    run = run_interpreted(__file__, "-x", "-k", "test_product and not gpu")
    assert run.returncode == 0 and f"{len(CASES)} passed" in run.stdout, run.stdout + run.stderr


class Linear(torch.nn.Module):
    """As SGLang's linear layers: the method does the product."""

    def __init__(self, features: int, depth: int):
        super().__init__()
        self.weight = torch.nn.Parameter(matrix(features, depth), requires_grad=False)
        self.quant_method = None


def head(layers: int) -> torch.nn.Module:
    """The modules of SGLang's draft model that are looked at."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList()
    for _ in range(layers):
        layer = torch.nn.Module()
        layer.self_attn, layer.mlp = torch.nn.Module(), torch.nn.Module()
        layer.self_attn.qkv_proj, layer.self_attn.o_proj = Linear(24, 32), Linear(16, 32)
        layer.mlp.gate_up_proj, layer.mlp.down_proj = Linear(48, 32), Linear(16, 24)
        model.layers.append(layer)
    return model


def test_the_heads_large_matrices_become_fp8_and_the_context_projections_do_not():
    model = head(2)
    before = [layer.mlp.gate_up_proj.weight.clone() for layer in model.layers]
    quantise_head(model)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(2))
    for layer, weight in zip(model.layers, before):
        assert layer.self_attn.qkv_proj.weight.dtype == torch.float32 and layer.self_attn.qkv_proj.quant_method is None
        assert {layer.self_attn.o_proj.weight.dtype, layer.mlp.down_proj.weight.dtype} == {FP8}
        linear, bias = layer.mlp.gate_up_proj, torch.arange(48.0)
        out = linear.quant_method.apply(linear, x, bias)
        rounded = dequantise_rows(linear.weight, linear.weight_scale, torch.float32)
        torch.testing.assert_close(out, x @ rounded.T + bias)
        assert 0 < (rounded - weight).norm() < 0.05 * weight.norm()


def test_a_quantised_head_is_refused():
    model = head(1)
    quantise_head(model)
    with pytest.raises(SpecflowConfigError, match="fp8_draft with a head whose weights are torch.float8_e4m3fn"):
        quantise_head(model)
