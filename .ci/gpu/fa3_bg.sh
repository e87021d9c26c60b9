#!/bin/bash
# FlashAttention 3 into /tmp/site (flag: fa3). Started with setsid by the call that brings its last piece.
source /tmp/lease/env.sh
touch $FLAGS/fa3_running
for i in $(seq 120); do [ -e $FLAGS/unpacked ] && break; sleep 1; done
cat /tmp/b/fa3.[0-9]* | xz -dc -T0 > /tmp/site/sgl_kernel/flash_ops.abi3.so.new && mv /tmp/site/sgl_kernel/flash_ops.abi3.so.new /tmp/site/sgl_kernel/flash_ops.abi3.so && touch $FLAGS/fa3
rm -f $FLAGS/fa3_running
say "fa3: $(ls -la /tmp/site/sgl_kernel/flash_ops.abi3.so)"
