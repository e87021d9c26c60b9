"""The verify pass put into an attention backend: what the backend itself is asked to do around it."""

import types

import pytest
import torch

from sgl_specflow.runtime.tree_backend import with_tree_verify


class Backend:
    """As far as SGLang's backends are looked at while CUDA graphs are set up."""

    is_draft_runner = False

    def __init__(self):
        self.is_draft_runner = False
        self.allocated = []

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        self.allocated.append((max_bs, max_num_tokens, self.is_draft_runner))


@pytest.fixture
def backend():
    runner = types.SimpleNamespace(
        spec_algorithm=types.SimpleNamespace(is_speculative=lambda: True, name="JETFLOW"),
        req_to_token_pool=types.SimpleNamespace(req_to_token=torch.zeros(5, 300, dtype=torch.int32)),
        token_to_kv_pool=None,
    )
    return with_tree_verify(Backend(), model_runner=runner, backend_str="triton", init_new_workspace=False)


def test_a_backend_allocates_nothing_for_the_verify_pass_that_it_does_not_run(backend):
    backend.init_cuda_graph_state(4, 4 * 64)
    # One token a request, and no byte mask of nodes and context positions, which SGLang leaves out for draft runners.
    assert backend.allocated == [(4, 4, True)]
    assert backend.is_draft_runner is False
    buffers = backend.tree_graph_buffers
    assert buffers.ancestors.shape == (4, 64, 2) and buffers.prefix_slots.shape == (4 * 300,)


def test_a_backend_of_another_algorithm_is_left_alone():
    runner = types.SimpleNamespace(spec_algorithm=types.SimpleNamespace(is_speculative=lambda: True, name="EAGLE"))
    backend = Backend()
    assert with_tree_verify(backend, model_runner=runner, backend_str="triton", init_new_workspace=False) is backend
    assert type(backend) is Backend
