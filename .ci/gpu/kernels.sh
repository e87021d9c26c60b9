#!/bin/bash
# Attention and Gated Delta Net alone, while pieces come: their GPU tests, then (SGLang unpacked; not with EVALS=no) eval tree_attention. Started with setsid in /tmp/kernels/repo.
mkdir -p /tmp/lease; cp .ci/gpu/* /tmp/lease/; source /tmp/lease/env.sh; mkdir -p $LOGS/console
export XDG_CACHE_HOME=/tmp/kernels/cache
python3 -m pip install -q --no-deps --no-build-isolation --no-index --target /tmp/kernels/site . 2>&1 | grep -v WARN
cd /tmp/kernels/repo/tests
PYTHONPATH=/tmp/kernels/site timeout 130 python3 -m pytest -q -p no:cacheprovider -m gpu -n 8 test_tree_attention_cuda.py test_gdn_kernel.py > $LOGS/console/kernel_tests.log 2>&1 < /dev/null
[ "${EVALS:-yes}" = yes ] || { touch $FLAGS/kernels_done; exit; }
for i in $(seq 100); do [ -e $FLAGS/unpacked ] && break; sleep 1; done
cd /tmp/kernels
export PYTHONPATH=/tmp/kernels/site:/tmp/site
timeout 100 python3 -m sgl_specflow.eval tree_attention --out $RES/tree_attention_h200.json --commit $COMMIT > $LOGS/console/tree_attention.log 2>&1 < /dev/null
timeout 60 python3 -m sgl_specflow.eval tree_attention --splits 1 2 4 8 16 --out $RES/tree_attention_splits_h200.json --commit $COMMIT > $LOGS/console/splits.log 2>&1 < /dev/null
touch $FLAGS/kernels_done
