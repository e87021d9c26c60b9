#!/usr/bin/env bash
# From a bare machine with Python 3.11 or 3.12 to tree speculative decoding next to plain decoding, on a GPU or a CPU.
# Options are those of `python -m sgl_specflow.launch.quickstart --help`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment quickstart
fetch_model
cd "$root"
exec "$python" -m sgl_specflow.launch.quickstart --model-path "$model" --logs "$logs" "$@"
