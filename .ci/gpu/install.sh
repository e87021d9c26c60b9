# sourced in the working tree's root: what is left of unpacking, the package, heads, tests, data
T0=$(date +%s)
HEADS=${HEADS:-$(ls /tmp/heads 2>/dev/null | grep -q . && echo yes || echo no)}  # those that came
[ -e $FLAGS/unpacked ] || { say "waiting for the unpacking"; for i in $(seq 90); do [ -e $FLAGS/unpacked ] && break; sleep 1; done; }
[ -e $FLAGS/unpacked ] || bash $N/unpack_bg.sh
[ -e $FLAGS/unpacked ] || return 1
# unpack.sh makes /tmp/site from bundle and fa3; /tmp/site is there already, so it sets variables only: fa3 is done here.
if ls /tmp/b/fa3.[0-9]* >/dev/null 2>&1 && [ ! -e $FLAGS/fa3 ]; then
  for i in $(seq 60); do [ -e $FLAGS/fa3_running ] && [ ! -e $FLAGS/fa3 ] || break; sleep 1; done
  [ -e $FLAGS/fa3 ] || { cat /tmp/b/fa3.[0-9]* | xz -dc -T0 > /tmp/site/sgl_kernel/flash_ops.abi3.so && touch $FLAGS/fa3; }
fi
source .gpu/unpack.sh /tmp/b 2>/dev/null || export PYTHONPATH=/tmp/site HF_HUB_OFFLINE=1 SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python PYTHONUNBUFFERED=1
echo 'export PYTHONPATH=/tmp/site SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python' > $N/site_env.sh
# SGLang asks for sglang-kernel's version by its metadata.
for d in /tmp/site/sglang_kernel-*.dist-info /tmp/site/sgl_kernel-*.dist-info; do
  [ -e "$d/METADATA" ] || continue
  sed -i 's/^Version: .*/Version: 0.4.10/' "$d/METADATA"
  case $d in *sglang_kernel-0.4.10.dist-info|*sgl_kernel-*) ;; *) mv "$d" /tmp/site/sglang_kernel-0.4.10.dist-info ;; esac
done
rm -rf build *.egg-info
python3 -m pip install -q --upgrade --no-deps --no-build-isolation --no-index --target /tmp/site . 2>&1 | grep -v -i "warning\|already exists" | tail -5
[ -e /tmp/site/sgl_specflow/eval/inflation.py ] || { echo "sgl_specflow is not in /tmp/site"; return 1; }
if [ $HEADS = yes ]; then
  mkdir -p /tmp/site/sgl_specflow/drafter/heads; cp -r /tmp/heads/* /tmp/site/sgl_specflow/drafter/heads/ || return 1
else
  say "no heads: phases that serve SmolLM2 will fail"
fi
cp -r tests pyproject.toml $RUN/; mkdir -p /tmp/data; cp .gpu/data/* /tmp/data/
(cd $RUN && python3 - <<'P'
import importlib.metadata as m, torch, sgl_specflow
from sgl_specflow.eval.heads import HEADS
print("sgl_specflow from", sgl_specflow.__file__, "heads", sorted(p.name for p in HEADS.glob("*")) if HEADS.is_dir() else None)
print({p: m.version(p) for p in ("sglang", "sglang-kernel", "torch", "triton", "transformers", "sgl-specflow", "pytest")}, torch.cuda.device_count(), "GPUs")
P
) || return 1
say "installed in $(( $(date +%s) - T0 )) s"; true
