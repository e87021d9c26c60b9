#!/bin/bash
# Lease A, one H200. COMMIT=<sha> [PHASES="gdn inflation throughput correctness moe hybrid experts widths"] [WAIT=200] bash .ci/gpu/main.sh   (in the working tree's root)
set -u
source "$(dirname "$0")/env.sh"; source "$(dirname "$0")/phases.sh"
: "${COMMIT:?give COMMIT}"; PHASES=${PHASES:-inflation throughput correctness moe hybrid}
if [ "${1:-}" != background ]; then
  for i in $(seq ${K_WAIT:-60}); do [ -e $FLAGS/kernels_done ] && break; sleep 1; done
  install_all
  go_on_in_background
fi

# Of the dense hybrid (qwen3.5): the first case twice, the other with chunks, retractions and a Weaver. No gpu marker there.
GDN_JETFLOW='(test_greedy_equals_plain_decoding and (jetflow-64-unequal or jetflow-64-shared or jetflow-64-exactly or jetflow-64-stop or jetflow-64-penalties)) or first[jetflow-64]'
GDN_DFLASH='dflash_tfm-33 and test_greedy_equals_plain_decoding and (unequal or shared or exactly or stop or penalties)'
SMALL="--cuda-graph-max-bs-decode 8 --cuda-graph-backend-prefill disabled --mem-fraction-static 0.8 --sleep-on-idle"
model() { for i in $(seq 120); do [ -e $FLAGS/smollm2 ] && return 0; sleep 1; done; say "no SmolLM2: see console/convert.log"; return 1; }
# inflation of Qwen3-8B: plain + four trees, then two
inflation() {
  part inflation_8b ${T_INFLATION:-400} $EVAL inflation --model qwen3-8b \
    --runs jetflow:64:fp8,jetflow:16,jetflow:64,jetflow:256,jetflow:16:fp8,jetflow:256:fp8 \
    --points 1x128,1x4096,1x32768,8x4096 --plain-backends fa3 --steps 60 --profile 1x4096 --at-once ${N1:-5} \
    --max-total-tokens 38912 --out $RES/inflation_8b.json --logs $LOGS/inflation --commit $COMMIT \
    -- --sleep-on-idle --mem-fraction-static 0.95
}
# throughput of SmolLM2, ten servers
throughput() {
  model || return
  part throughput ${T_THROUGHPUT:-380} $EVAL throughput --model-path /tmp/smollm2 --data /tmp/data --budgets 16,64,256 \
    --batches 1,8 --rows 24 --tokens 256 --rounds 2 --out $RES/throughput_smollm2_h200.json --logs $LOGS/throughput \
    --commit $COMMIT ${DRAFTERS:+--drafters $DRAFTERS} -- $SMALL --attention-backend fa3
}
# correctness: few servers at once (3 + 2 + 1 + 1 + 1 to begin with)
correctness() {
  model || return
  part lossless ${T_CORRECTNESS:-300} $EVAL lossless --model-path /tmp/smollm2 --data /tmp/data --algorithms dflash_tfm \
    --budgets 16,64 --pages 1,16 --batches 1,8 --parallel 3 --out $RES/lossless_dflash_tfm_h200.json --logs $LOGS/lossless \
    --commit $COMMIT -- $SMALL &
  part bfloat16 ${T_CORRECTNESS:-300} $PYTEST --junitxml=$RES/junit_bfloat16.xml --basetemp=$N/pytest_c -m gpu \
    tests/test_bfloat16_serving.py &
  gdn_serving &
  part quantised_target ${T_CORRECTNESS:-300} $EVAL quantised_target --model-path /tmp/smollm2 --data /tmp/data \
    --out $RES/quantised_target_smollm2_h200.json --logs $LOGS/quantised --commit $COMMIT -- $SMALL &
  wait
  keep_logs pytest_c
}
gdn_serving() {
  part gdn_jetflow ${T_CORRECTNESS:-300} $PYTEST --junitxml=$RES/junit_gdn_jetflow.xml --basetemp=$N/pytest_d1 \
    tests/test_gdn_serving.py -k "$GDN_JETFLOW" &
  part gdn_dflash_tfm ${T_CORRECTNESS:-300} $PYTEST --junitxml=$RES/junit_gdn_dflash_tfm.xml --basetemp=$N/pytest_d2 \
    tests/test_gdn_serving.py -k "$GDN_DFLASH" &
  wait
  keep_logs pytest_d1 pytest_d2
}
# Gated Delta Net's kernel against SGLang's, the shapes that have goals first
gdn() {
  part gdn ${T_GDN:-150} $EVAL gdn --out $RES/gdn_verify_h200.json --commit $COMMIT \
    --shapes 1x64,1x128,1x256,4x128,1x16,1x32,4x16,4x32,4x64,4x256,16x64,16x128
}
# Offline accept lengths of SmolLM2's Weaver by rounds of 4, 8 and 16, on the prompts of acceptance_smollm2.json; what that lacks first
widths() {
  model || return
  local head=/tmp/site/sgl_specflow/drafter/heads/smollm2-135m-dflash weaver=/tmp/site/sgl_specflow/drafter/heads/smollm2-135m-weaver
  part widths ${T_WIDTHS:-330} python3 -m sgl_specflow.training evaluate target=/tmp/smollm2 data=/tmp/data "heads=[$head]" \
    "weavers={$head: $weaver}" 'weaver_widths=[4,8,16]' 'budgets=[256,128,64,32,16]' 'path_refresh=[]' \
    rows=${WIDTHS_ROWS:-200} max_new_tokens=${WIDTHS_TOKENS:-256} out=$RES/acceptance_smollm2_widths.json "commit='$COMMIT'"
}
# Qwen3-30B-A3B: two servers of 61 GB at once; then the experts counted
MOE="--sleep-on-idle --mem-fraction-static 0.97"
moe() {
  part inflation_moe ${T_MOE:-330} $EVAL inflation --model qwen3-30b-a3b --runs jetflow:16,jetflow:64,jetflow:256 --points 1x4096 \
    --plain-backends fa3 --steps 60 --profile 1x4096 --at-once 2 --max-total-tokens 12288 --out $RES/inflation_moe.json \
    --logs $LOGS/moe --commit $COMMIT -- $MOE
}
# Qwen3.6-27B: two servers of 54 GB at once
hybrid() {
  part inflation_27b ${T_HYBRID:-330} $EVAL inflation --model qwen3.6-27b --runs ${HYBRID_RUNS:-jetflow:64:fp8,jetflow:128:fp8,dflash_tfm:64:fp8} \
    --points 1x4096,1x128 --plain-backends fa3 --steps 60 --profile 1x4096 --at-once 2 --max-total-tokens 12288 \
    --out $RES/inflation_27b.json --logs $LOGS/hybrid --commit $COMMIT -- --sleep-on-idle --max-mamba-cache-size 8 --mem-fraction-static 0.95
}
experts() {
  part experts ${T_EXPERTS:-330} $EVAL experts --model qwen3-30b-a3b --budgets 16,64 --points 1x4096 --at-once 2 \
    --max-total-tokens 12288 --out $RES/experts_h200.json --logs $LOGS/experts --commit $COMMIT -- $MOE
}

run_phases $PHASES
