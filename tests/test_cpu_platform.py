"""SGLang on the CPU reference platform: its selection, its flags, its PyTorch kernels, and text against transformers."""

import functools
import inspect
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress

import pytest
import tiny_models
import torch
from transformers import AutoModelForCausalLM

from sgl_specflow.errors import SpecflowConfigError
from sgl_specflow.runtime import cpu_gdn_ops, cpu_ops, cpu_platform

needs_cpu = pytest.mark.skipif(
    cpu_platform.accelerator_present(), reason="the reference platform stands in only where there is no accelerator"
)
START_SECONDS = 600
HOOKS = [*cpu_ops.HOOKS, *cpu_gdn_ops.HOOKS]


# --- selection -------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch):
    """Set what activate() looks at: machine(accelerator=..., **environment)."""

    def set_up(accelerator: bool, **environment):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: accelerator)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
        for name in ("SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE", "OMP_WAIT_POLICY"):
            monkeypatch.setenv(name, "")  # so that monkeypatch also takes back what activate() sets
            monkeypatch.delenv(name)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return set_up


def test_stands_in_where_there_is_no_accelerator(machine):
    machine(accelerator=False)
    assert pkgutil.resolve_name(cpu_platform.activate()) is cpu_platform.CpuReferencePlatform


def test_idle_threads_of_workers_do_not_spin(machine):
    machine(accelerator=False)
    cpu_platform.activate()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    os.environ["OMP_WAIT_POLICY"] = "ACTIVE"
    cpu_platform.activate()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_leaves_an_accelerator_alone(machine):
    machine(accelerator=True)
    assert cpu_platform.activate() is None
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_leaves_another_kind_of_accelerator_alone(machine, monkeypatch):
    machine(accelerator=False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert cpu_platform.activate() is None


def test_sglang_platform_selects_it_on_a_machine_with_an_accelerator(machine):
    machine(accelerator=True, SGLANG_PLATFORM=cpu_platform.NAME)
    assert cpu_platform.activate() is not None
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "", "SGLang would still choose CUDA kernels"


def test_another_platform_by_name_wins(machine):
    machine(accelerator=False, SGLANG_PLATFORM="someone_else")
    assert cpu_platform.activate() is None


def test_sglangs_own_cpu_engine_wins_when_asked_for(machine):
    machine(accelerator=False, SGLANG_USE_CPU_ENGINE="1")
    assert cpu_platform.activate() is None


# --- flags -----------------------------------------------------------------------------------------------------------


def resolve(model, **flags):
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(model_path=str(model), **flags)
    server_args.resolve_once()
    return resolved_view(server_args)


@needs_cpu
def test_defaults_need_no_flags(llama):
    flags = resolve(llama.folder)
    assert flags.device == "cpu"
    assert flags.attention_backend == "torch_native"
    assert flags.sampling_backend == "pytorch"
    assert flags.disable_overlap_schedule
    assert flags.max_total_tokens == cpu_platform.DEFAULT_MAX_TOTAL_TOKENS


@needs_cpu
def test_limits_given_by_the_user_win(llama):
    flags = resolve(llama.folder, max_total_tokens=1024, max_running_requests=3)
    assert (flags.max_total_tokens, flags.max_running_requests) == (1024, 3)


@needs_cpu
@pytest.mark.parametrize(
    "flag, value, allowed",
    [
        ("device", "cuda", "--device cpu"),
        ("attention_backend", "flashinfer", "--attention-backend torch_native"),
        ("attention_backend", "intel_amx", "--attention-backend torch_native"),
        ("sampling_backend", "flashinfer", "--sampling-backend pytorch"),
        ("kv_cache_dtype", "fp8_e5m2", "--kv-cache-dtype auto"),
        ("quantization", "fp8", "the default only"),
    ],
)
def test_a_flag_it_cannot_serve_is_refused_by_name(llama, flag, value, allowed):
    with pytest.raises(SpecflowConfigError) as refusal:
        resolve(llama.folder, **{flag: value})
    text = str(refusal.value)
    assert f"--{flag.replace('_', '-')} {value}" in text
    assert allowed in text
    assert "leave" in text


# --- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target, hook, _", HOOKS, ids=[target for target, _, _ in HOOKS])
def test_a_replacement_takes_its_targets_arguments(target, hook, _):
    theirs = [(p.name, p.kind, p.default) for p in inspect.signature(pkgutil.resolve_name(target)).parameters.values()]
    ours = [(p.name, p.kind, p.default) for p in inspect.signature(hook).parameters.values()]
    assert ours == theirs


def test_slots_written_to_a_row_are_read_back():
    table = torch.zeros(4, 10, dtype=torch.int32)
    requests, starts, ends = torch.tensor([3, 1, 0]), torch.tensor([2, 0, 5]), torch.tensor([5, 0, 9])
    slots = torch.arange(100, 107)
    cpu_ops.assign_req_to_token_pool_func(requests, table, starts, ends, slots, 3)
    assert table[3].tolist() == [0, 0, 100, 101, 102, 0, 0, 0, 0, 0]
    assert table[0].tolist() == [0, 0, 0, 0, 0, 103, 104, 105, 106, 0]
    assert table[1].sum() == table[2].sum() == 0
    read = cpu_ops.extend_cache_locs(
        req_pool_indices=requests,
        req_to_token=table,
        start_offset=starts,
        end_offset=ends,
        batch_size=3,
        draft_token_num=4,
        device="cpu",
    )
    assert read.dtype == torch.int64
    assert read.tolist() == [*range(100, 107), 0, 0, 0, 0, 0]


def test_a_row_that_is_too_short_is_refused():
    table = torch.zeros(2, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match="column 9 of req_to_token, whose rows hold 8"):
        cpu_ops.assign_req_to_token_pool_func(
            torch.tensor([0]), table, torch.tensor([7]), torch.tensor([9]), torch.tensor([1, 2]), 1
        )


def test_last_slot_of_a_prefix():
    table = torch.arange(20, dtype=torch.int32).view(2, 10)
    assert cpu_ops.get_last_loc(table, torch.tensor([1, 0, 1]), torch.tensor([3, 0, 10])).tolist() == [12, -1, 19]


def test_draft_slots_and_positions():
    table = torch.arange(24, dtype=torch.int32).view(2, 12)
    slots, positions = torch.zeros(8, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    cpu_ops.assign_draft_cache_locs_contiguous_func(
        torch.tensor([1, 0]), table, torch.tensor([2, 5]), slots, topk=2, num_cols=2, positions=positions
    )
    assert slots.tolist() == [14, 15, 16, 17, 5, 6, 7, 8]
    assert positions.tolist() == [2, 2, 5, 5]


def test_packed_slots_of_accepted_nodes():
    out = torch.full((6,), -7)
    cpu_ops.fill_accept_out_cache_loc_func(torch.tensor([[0, 2, -1], [3, -1, -1]]), torch.arange(50, 56), out, 6)
    assert out.tolist() == [50, 52, 53, -7, -7, -7]
    out = torch.full((6,), -7)
    cpu_ops.fill_front_out_cache_loc_func(torch.tensor([1, 3]), torch.arange(50, 56), out)
    assert out.tolist() == [50, 53, 54, 55, -7, -7]


def test_outputs_of_a_verify_step():
    predict = torch.tensor([10, 11, 12, 13, 14, 15], dtype=torch.int32)
    accept_index = torch.tensor([[0, 2, -1], [3, 4, 5]], dtype=torch.int32)
    accept_lens, seq_lens = torch.tensor([2, 3], dtype=torch.int32), torch.tensor([7, 6])
    lens, bonus = cpu_ops.prepare_verify_commit_outputs(predict, accept_index, accept_lens, seq_lens)
    assert (lens.tolist(), lens.dtype) == ([9, 9], torch.int64)
    assert (bonus.tolist(), bonus.dtype) == ([12, 15], torch.int32)
    _, _, (last, track), (correct, select, ids) = cpu_ops.prepare_verify_commit_outputs(
        predict, accept_index, accept_lens, seq_lens, num_draft_tokens=3, mamba_track_interval=8
    )
    assert last.tolist() == [2, 2]
    assert track.tolist() == [0, 1], "the nodes at lengths 8 of both requests"
    assert (correct.tolist(), select.tolist(), ids.tolist()) == ([1, 2], [1, 5], predict.tolist())
    bonus = torch.zeros(2, dtype=torch.int64)
    cpu_ops.fill_bonus_tokens_func(torch.tensor([[4, 5, 6], [7, 8, 9]]), accept_lens, bonus, 3, 2)
    assert bonus.tolist() == [5, 9]


@pytest.mark.parametrize("entry_page_size", [1, 4])
def test_read_stream_lists_every_slot_of_every_request(entry_page_size):
    slots = torch.arange(300, 324, dtype=torch.int32).view(2, 12)
    ids = slots if entry_page_size == 1 else slots[:, ::4] // 4
    source = types.SimpleNamespace(
        ids=ids.contiguous(),
        row_ids=torch.tensor([1, 0]),
        row_stride=ids.shape[1],
        entry_page_size=entry_page_size,
        is_translated=False,
    )
    translator = types.SimpleNamespace(_reads_translated=lambda kind: False, read_source=lambda *_, **__: source)
    lens, out = torch.tensor([5, 7]), torch.zeros(12, dtype=torch.int32)
    indptr = torch.tensor([0, 5, 12])
    cpu_ops.pack_read_stream(translator, None, req_pool_indices=None, seq_lens=lens, indptr=indptr, out=out)
    assert out.tolist() == [*range(312, 317), *range(300, 307)]
    cpu_ops.pack_read_stream(
        translator,
        None,
        req_pool_indices=None,
        seq_lens=torch.tensor([5, 7]),
        indptr=indptr,
        out=out,
        kv_start_idx=torch.tensor([2, 4]),
    )
    assert out.tolist() == [*range(314, 319), *range(304, 311)]


def test_norm_and_rotation_of_q_and_k():
    torch.manual_seed(0)
    heads, kv_heads, dim, tokens = 3, 2, 8, 5
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, dtype=torch.bfloat16)
    weights = torch.rand(2, dim, dtype=torch.bfloat16) + 0.5
    angle = torch.outer(torch.arange(20.0), torch.tensor([1.0, 0.3, 0.1, 0.03]))
    table, positions = torch.cat([angle.cos(), angle.sin()], dim=-1), torch.tensor([0, 3, 7, 1, 19])
    expected = qkv.clone().view(tokens, -1, dim)
    for head in range(heads + kv_heads):
        x = expected[:, head].float()
        normed = torch.nn.functional.rms_norm(x, (dim,), weights[0 if head < heads else 1].float(), eps=1e-6)
        pair = torch.view_as_complex(normed.bfloat16().float().view(tokens, 2, dim // 2).movedim(1, 2).contiguous())
        turned = torch.view_as_real(pair * torch.polar(torch.ones(()), angle[positions])).movedim(2, 1)
        expected[:, head] = turned.reshape(tokens, dim).bfloat16()
    cpu_ops.table_qk_norm_rope_(qkv, positions, *weights, table, heads, kv_heads, dim, 1e-6)
    torch.testing.assert_close(qkv.view(tokens, -1, dim), expected, rtol=8e-3, atol=1e-5)


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 of whole 4-byte blocks with seed 0, from its public description."""

    def rotate(x, bits):
        return (x << bits | x >> (32 - bits)) & 0xFFFFFFFF

    h = 0
    for start in range(0, len(data), 4):
        k = int.from_bytes(data[start : start + 4], "little") * 0xCC9E2D51 & 0xFFFFFFFF
        h = rotate(h ^ rotate(k, 15) * 0x1B873593 & 0xFFFFFFFF, 13) * 5 + 0xE6546B64 & 0xFFFFFFFF
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


def test_seeded_sampling_hashes_as_murmur3_does():
    assert murmur3(b"test") == 0xBA6BD213  # the published vector
    seeds, positions, columns = [0, 1, 2**63 + 12345, 2**32 - 1], [0, 5, 1000, 2**31], [0, 1, 49151]
    hashed = cpu_ops.murmur_hash32(
        torch.tensor(seeds, dtype=torch.uint64), torch.tensor(positions), torch.tensor(columns)
    )
    assert hashed.dtype == torch.uint32
    expected = [
        [murmur3(s.to_bytes(8, "little") + p.to_bytes(4, "little") + c.to_bytes(4, "little")) for c in columns]
        for s, p in zip(seeds, positions, strict=True)
    ]
    assert hashed.tolist() == expected


# --- serving ---------------------------------------------------------------------------------------------------------


class Tiny:
    """A tiny model's folder and its text from transformers."""

    def __init__(self, folder, dtype=torch.float32):
        self.folder = folder
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        torch.set_num_threads(1)

    @torch.inference_mode()
    def greedy(self, prompt: list[int], tokens: int, **more) -> list[int]:
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0, **more
        )
        return out[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def logprobs(self, prompt: list[int], continuation: list[int]) -> list[float]:
        logits = self.model(torch.tensor([prompt + continuation])).logits[0, len(prompt) - 1 : -1].float()
        return logits.log_softmax(-1).gather(1, torch.tensor(continuation).unsqueeze(1))[:, 0].tolist()


class Server:
    """`python -m sglang.launch_server`, unmodified, in a process of its own."""

    def __init__(self, url: str, log):
        self.url, self.log = url, log

    def post(self, path: str, body: dict | None = None, seconds: float = 60):
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            text = answer.read()
        return json.loads(text) if text[:1] in (b"{", b"[") else text

    def generate(self, prompts: list[list[int]], tokens: int = 24, more: dict | None = None, **sampling) -> list[dict]:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **sampling}
        return self.post("/generate", {"input_ids": prompts, "sampling_params": sampling, **(more or {})})

    def tokens(self, prompts, tokens: int = 24, **sampling) -> list[list[int]]:
        return [answer["output_ids"] for answer in self.generate(prompts, tokens, **sampling)]


@contextmanager
def serve(folder, work, *flags: str):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # SGLang's kernel library must not be needed, even where it is installed.
    blocked = work / "sgl_kernel"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise ImportError('blocked by the test')\n")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(work), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("SGLANG_USE_CPU_ENGINE", None)
    log = work / "server.log"
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder), "--port", str(port), *flags]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{' '.join(command)} did not start:\n{log.read_text()[-4000:]}")
            try:
                with urllib.request.urlopen(url + "/health", timeout=5):
                    break
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        yield Server(url, log)
    finally:
        # All of its processes, at once: nothing in there is worth a graceful 10 s.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Tiny(tiny_models.make_tiny_llama(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def page_1(llama, tmp_path_factory):
    """Page size 1, prompts in chunks, a prefix cache, and too few KV slots for the retraction test."""
    flags = ["--dtype", "float32", "--chunked-prefill-size", "32", "--max-total-tokens", "600"]
    flags += ["--schedule-conservativeness", "0.1"]
    with serve(llama.folder, tmp_path_factory.mktemp("page_1"), *flags) as server:
        yield server


@pytest.fixture(scope="module")
def page_16(llama, tmp_path_factory):
    """Page size 16, no prefix cache, sampling seeds honoured."""
    flags = ["--dtype", "float32", "--page-size", "16", "--enable-deterministic-inference", "--disable-radix-cache"]
    with serve(llama.folder, tmp_path_factory.mktemp("page_16"), *flags) as server:
        yield server


@pytest.fixture(params=["page_1", "page_16"], scope="module")
def server(request):
    return request.getfixturevalue(request.param)


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(2, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@needs_cpu
def test_greedy_text_is_transformers_text(server, llama):
    prompts = [prompt(length, length) for length in (1, 5, 16, 17, 31, 70)]
    assert server.tokens(prompts, 40) == [llama.greedy(p, 40) for p in prompts]


@needs_cpu
def test_text_does_not_depend_on_the_batch(server, llama):
    prompts = [prompt(length, 100 + length) for length in (3, 33, 9)]
    together = server.tokens(prompts, 20)
    assert together == [server.tokens([p], 20)[0] for p in reversed(prompts)][::-1]


@needs_cpu
def test_logprobs_are_transformers_logprobs(server, llama):
    prompts = [prompt(6, 1), prompt(40, 2)]
    for p, answer in zip(prompts, server.generate(prompts, 10, more={"return_logprob": True}), strict=True):
        given = [logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]]
        assert given == pytest.approx(llama.logprobs(p, answer["output_ids"]), abs=1e-4)


@needs_cpu
def test_a_chunked_prompt_is_found_again_in_the_prefix_cache(page_1, llama):
    page_1.post("/flush_cache")
    p = prompt(80, 3)
    first, second = (page_1.generate([p], 12)[0] for _ in range(2))
    longer = page_1.generate([p + first["output_ids"] + [5, 6, 7]], 12)[0]
    assert [a["meta_info"]["cached_tokens"] for a in (first, second)] == [0, 79]
    assert longer["meta_info"]["cached_tokens"] >= 80
    assert first["output_ids"] == second["output_ids"] == llama.greedy(p, 12)
    assert longer["output_ids"] == llama.greedy(p + first["output_ids"] + [5, 6, 7], 12)


@needs_cpu
def test_text_survives_retraction(page_1, llama):
    prompts = [prompt(20 + i, 200 + i) for i in range(8)]
    # SGLang admits too many only among requests that may stop early; here none does.
    texts = page_1.tokens(prompts, 110, ignore_eos=False, logit_bias={str(tiny_models.EOS): -1000.0})
    assert texts == [llama.greedy(p, 110, suppress_tokens=[tiny_models.EOS]) for p in prompts]
    assert "Retract requests" in page_1.log.read_text(), "the requests fitted: the test no longer retracts"


@needs_cpu
def test_an_aborted_request_leaves_the_server_serving(page_1, llama):
    answers = []
    body = {"input_ids": prompt(4, 9), "rid": "long", "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
    thread = threading.Thread(target=lambda: answers.append(page_1.post("/generate", body)))
    thread.start()
    time.sleep(0.4)
    page_1.post("/abort_request", {"rid": "long"})
    thread.join(30)
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert page_1.tokens([[7, 8, 9]], 8) == [llama.greedy([7, 8, 9], 8)]


@needs_cpu
def test_seeds_reproduce_samples_in_any_batch(page_16):
    a, b = prompt(9, 4), prompt(12, 5)
    alone = page_16.tokens([a], temperature=1.0, sampling_seed=7)[0]
    assert page_16.tokens([b, a], temperature=1.0, sampling_seed=7)[1] == alone
    assert page_16.tokens([a], temperature=1.0, sampling_seed=8)[0] != alone
    narrow = page_16.tokens([a], temperature=1.0, top_k=4, top_p=0.9, sampling_seed=7)
    assert page_16.tokens([a], temperature=1.0, top_k=4, top_p=0.9, sampling_seed=7) == narrow


@needs_cpu
def test_sampling_filters_and_biases(page_1):
    p = prompt(9, 6)
    greedy = page_1.tokens([p], 12)
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert page_1.tokens([p], 12, temperature=1.0, **narrow) == greedy, narrow
    assert page_1.tokens([p], 4, logit_bias={"7": 100.0}) == [[7] * 4]
    assert len({tuple(page_1.tokens([p], 12, temperature=1.5)[0]) for _ in range(3)}) > 1
    free = page_1.tokens([p], 60)[0]
    for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 2.0}):
        assert len(set(page_1.tokens([p], 60, **penalty)[0])) > len(set(free)), penalty


@needs_cpu
@pytest.mark.parametrize(
    "make, dtype, tolerance",
    [
        (tiny_models.make_tiny_qwen3, "bfloat16", 0.25),
        # All experts: where two are nearly as good, float16 chooses as the processor rounds, and the reference another.
        (functools.partial(tiny_models.make_tiny_qwen3_moe, chosen=8), "float16", 0.05),
    ],
)
def test_half_precision_and_other_models(make, dtype, tolerance, tmp_path):
    model = Tiny(make(tmp_path / "model"))
    with serve(model.folder, tmp_path / "server", "--dtype", dtype) as server:
        p = prompt(30, 11)
        answer = server.generate([p], 10, more={"return_logprob": True})[0]
    given = [logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]]
    assert given == pytest.approx(model.logprobs(p, answer["output_ids"]), abs=tolerance)
