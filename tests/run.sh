#!/usr/bin/env bash
# The whole test suite in its own environment: bash tests/run.sh [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/environment.sh"
make_environment test
fetch_model
cd "$root"
exec "$python" -m pytest -q -rs --durations=15 "$@"
