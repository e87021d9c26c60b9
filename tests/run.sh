#!/usr/bin/env bash
# The whole test suite in its own environment: bash tests/run.sh [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/environment.sh"
make_environment test
fetch_model
cd "$root"
# Two files at a time: most of the time goes into starting servers, one core each.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" -m pytest -q -rs --durations=15 -n 2 --dist loadfile "$@"
