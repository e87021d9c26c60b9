#!/bin/bash
# Lease B, two H200s. COMMIT=<sha> [PHASES="two_ranks inflation_8b inflation_27b"] [WAIT=200] bash .ci/gpu/tp2.sh   (in the working tree's root)
set -u
source "$(dirname "$0")/env.sh"; source "$(dirname "$0")/phases.sh"
: "${COMMIT:?give COMMIT}"; PHASES=${PHASES:-two_ranks inflation_8b inflation_27b}
# SGLang 0.5.23 rendezvouses NVLink multicast memory in three places of a plain two-rank server: its custom all-reduce,
# FlashInfer's fused all-reduce (on by itself on Hopper), and the gather of logits in every LogitsProcessor. The environment
# of env.sh keeps multicast off in PyTorch and NCCL; besides, the first two are switched off and the third is patched out.
AR="--disable-custom-all-reduce --enforce-disable-flashinfer-allreduce-fusion"
if [ "${1:-}" != background ]; then
  HEADS=no
  install_all
  gather=/tmp/site/sglang/srt/distributed/device_communicators/triton_symm_mem_ag.py
  sed -i 's/self\._state = self\._UNINIT if enabled else None/self._state = None/' $gather
  grep -q 'self\._state = self\._UNINIT if enabled' $gather && { echo "the gather of logits is not patched: no servers of two ranks"; exit 1; }
  grep -q 'self\._state = None' $gather || { echo "no gather found in $gather"; exit 1; }
  find /tmp/site/sglang/srt/distributed -name 'triton_symm_mem_ag*.pyc' -delete
  python3 -c "import torch, os; lib = os.path.join(os.path.dirname(torch.__file__), 'lib'); print('PyTorch knows TORCH_SYMM_MEM_DISABLE_MULTICAST:', any(b'TORCH_SYMM_MEM_DISABLE_MULTICAST' in open(os.path.join(lib, n), 'rb').read() for n in ('libtorch_cuda.so', 'libc10_cuda.so', 'libtorch_cpu.so') if os.path.exists(os.path.join(lib, n))))"
  nvidia-smi topo -m 2>&1 | head -6
  go_on_in_background
fi

# Inflation of Qwen3-8B on two ranks
inflation_8b() {
  part inflation_8b_tp2 ${T_8B:-220} $EVAL inflation --model qwen3-8b --runs jetflow:64,jetflow:64:fp8 --points 1x128,1x4096 \
    --plain-backends fa3 --steps 60 --at-once 3 --max-total-tokens 16384 --out $RES/inflation_8b_tp2.json --logs $LOGS/8b \
    --commit $COMMIT --tensor-parallel 2 -- --sleep-on-idle --mem-fraction-static 0.9 $AR
}
# Of Qwen3.6-27B
inflation_27b() {
  part inflation_27b_tp2 ${T_27B:-220} $EVAL inflation --model qwen3.6-27b --runs jetflow:64:fp8 --points 1x4096,1x128 \
    --plain-backends fa3 --steps 60 --at-once 2 --max-total-tokens 16384 --out $RES/inflation_27b_tp2.json --logs $LOGS/27b \
    --commit $COMMIT --tensor-parallel 2 -- --sleep-on-idle --max-mamba-cache-size 8 --mem-fraction-static 0.93 $AR
}
# The repository's own tests of two ranks, against plain decoding of one: servers start one after another, allow 240 s
two_ranks() {
  export MORE_SERVER_FLAGS="$AR"
  local run="env PYTHONPATH=$N:/tmp/site $PYTEST -p more_flags -k"
  part greedy_llama ${T_RANKS:-240} $run "jetflow-64-two-ranks and not moe" --basetemp=$N/pytest_t1 --junitxml=$RES/junit_tp2_llama.xml tests/test_serving_greedy.py &
  part greedy_moe ${T_RANKS:-240} $run "moe-jetflow-64-two-ranks" --basetemp=$N/pytest_t2 --junitxml=$RES/junit_tp2_moe.xml tests/test_serving_greedy.py &
  part gdn ${T_RANKS:-240} $run "jetflow-64-two-ranks and not moe" --basetemp=$N/pytest_t3 --junitxml=$RES/junit_tp2_gdn.xml tests/test_gdn_serving.py &
  wait
  keep_logs pytest_t1 pytest_t2 pytest_t3
}
run_phases $PHASES
