#!/bin/bash
# pieces.sh bundle|wheel|fa3|heads: puts what this call carried into place; the last piece of a kind starts its unpacking.
mkdir -p /tmp/lease; cp .ci/gpu/* /tmp/lease/ 2>/dev/null
source /tmp/lease/env.sh
mkdir -p $LOGS/console /tmp/w /tmp/heads
case $1 in
  bundle)
    cp .gpu/bundle.0* /tmp/b/
    if [ "$(ls /tmp/b/bundle.0[0-5] | wc -l)" = 6 ]; then setsid nohup bash $N/unpack_bg.sh > $LOGS/console/unpack.log 2>&1 < /dev/null & fi ;;
  wheel)
    cp .gpu/wheel/p* /tmp/w/; cp launch/get_smollm2.py /tmp/w/
    if [ "$(ls /tmp/w/p[0-3] | wc -l)" = 4 ]; then setsid nohup bash $N/convert_bg.sh /tmp/w/get_smollm2.py > $LOGS/console/convert.log 2>&1 < /dev/null & fi ;;
  fa3)
    cp .gpu/fa3.0* /tmp/b/
    if [ "$(ls /tmp/b/fa3.0[0-7] | wc -l)" = 8 ]; then setsid nohup bash $N/fa3_bg.sh > $LOGS/console/fa3.log 2>&1 < /dev/null & fi ;;
  heads)
    for d in .gpu/heads1 .gpu/heads2; do [ -d $d ] && cp -r $d/* /tmp/heads/; done ;;
esac
ls -la /tmp/b /tmp/w /tmp/heads $FLAGS | cut -c1-120; for f in $LOGS/console/*.log; do [ -e "$f" ] && tail -n 3 "$f"; done; df -h /tmp | tail -1; true
