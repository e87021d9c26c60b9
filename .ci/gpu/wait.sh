#!/bin/bash
# wait.sh SECONDS: until $FLAGS/all_done or SECONDS, then the ends of all consoles, and results and logs packed to $OUT.
source /tmp/lease/env.sh
OUT=${OUT:-$N/pack}; mkdir -p "$OUT"
end=$(( $(date +%s) + ${1:-120} ))
while [ ! -e $FLAGS/all_done ] && [ "$(date +%s)" -lt $end ]; do sleep 1; done
pack() {
  rm -rf $N/cut; mkdir -p $N/cut
  find $LOGS -type f -name '*.log' | while read -r f; do
    name=$(echo "${f#$LOGS/}" | tr '/' '_'); tail -c 400000 "$f" > "$N/cut/$name"
  done
  tar czf "$OUT/logs.tgz" -C $N cut
  tar czf "$OUT/rest.tgz" -C $N out
}
pack
for f in $LOGS/console/*.log; do echo "== $(basename $f) =="; tail -n ${LINES_EACH:-14} "$f" | cut -c1-260; done
echo "== phases: $(cat $FLAGS/phases 2>/dev/null | tr '\n' ' ')"
nvidia-smi --query-gpu=memory.used --format=csv,noheader 2>/dev/null | tr '\n' ' '
ls -la $RES; ls -la "$OUT"
[ -e $FLAGS/all_done ] && echo ALL_DONE || echo STILL_RUNNING
