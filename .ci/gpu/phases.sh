# sourced by main.sh and tp2.sh: how they begin, and how a part runs
EVAL="python3 -m sgl_specflow.eval"
PYTEST="python3 -m pytest -v -rs -p no:cacheprovider --durations=8"
# In the working tree's root: the scripts to $N, and everything that is measured installed
install_all() {
  mkdir -p $LOGS/console; cp .ci/gpu/* $N/
  source $N/install.sh || { echo INSTALL FAILED; cat $LOGS/console/*.log | tail -40; exit 1; }
}
# The calling script again, as `SCRIPT background`, which runs $PHASES; this process waits for it
go_on_in_background() {
  local name=$(basename "$0" .sh)
  export COMMIT PHASES; rm -f $FLAGS/all_done
  setsid nohup bash $N/$name.sh background > $LOGS/console/$name.log 2>&1 < /dev/null &
  exec bash $N/wait.sh "${WAIT:-200}"
}
# part NAME SECONDS COMMAND...: its console in console/NAME.log, its status in $FLAGS/phases
part() {
  local name=$1 seconds=$2 begun=$(date +%s) rc; shift 2
  say "$name: $*" > $LOGS/console/$name.log
  timeout -s TERM -k 20 "$seconds" "$@" >> $LOGS/console/$name.log 2>&1 < /dev/null; rc=$?
  echo "$name:rc=$rc:$(( $(date +%s) - begun ))s" >> $FLAGS/phases
  say "$name ended with $rc after $(( $(date +%s) - begun )) s"
  return $rc
}
# Servers that a part left behind, by their ids: everything on this bare machine's card is ours.
sweep() {
  command -v nvidia-smi >/dev/null || return 0
  local pids pid
  for i in $(seq 15); do
    pids=$(nvidia-smi --query-compute-apps=pid --format=csv,noheader 2>/dev/null | grep -E '^[0-9]+$'); [ -z "$pids" ] && break; sleep 1
  done
  ps -eo pid,args | grep -E 'sglang[.]launch_server|sglang::' | grep -v grep | while read -r pid _; do kill -KILL "$pid" 2>/dev/null; done
  for pid in $pids; do kill -KILL "$pid" 2>/dev/null; done
  sleep 1
}

# keep_logs FOLDER...: the servers' logs out of pytest's folders in $N
keep_logs() {
  local f l
  for f in "$@"; do
    find $N/$f -name '*.log' 2>/dev/null | while read -r l; do
      mkdir -p $LOGS/$f; cp "$l" "$LOGS/$f/$(echo "${l#$N/$f/}" | tr / _)"
    done
  done
}
# run_phases PHASE...: in the background, one after the other; A+B are two side by side. $FLAGS/skip_PHASE leaves one out
run_phases() {
  START=$(date +%s); rm -f $FLAGS/all_done
  cd $RUN  # the checkout's own sgl_specflow must not be found first
  for together in "$@"; do
    for phase in ${together//+/ }; do
      [ -e $FLAGS/skip_$phase ] && { echo "$phase=skipped" >> $FLAGS/phases; continue; }
      echo "$phase=started" >> $FLAGS/phases; say "phase $phase at $(( $(date +%s) - START )) s"; $phase &
    done
    wait; sweep
  done
  touch $FLAGS/all_done; say "all done at $(( $(date +%s) - START )) s"
}
