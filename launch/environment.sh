# Sourced by launch/quickstart.sh and tests/run.sh: makes the Python environment and fetches the model.
#   make_environment EXTRA   leaves $python with this checkout installed, editable, as `.[EXTRA]`
#   fetch_model              leaves $model, a Hugging Face folder of SmolLM2-135M-Instruct
# SPECFLOW_VENV names an environment to use instead of .venv; SPECFLOW_PYTHON the interpreter that makes it.
# A stamp (hash of pyproject.toml, Python and folder) in the environment says what is installed: nothing is done twice.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${SPECFLOW_VENV:-$root/.venv}
python=$venv/bin/python
logs=$root/.cache/logs
install_seconds=${SPECFLOW_INSTALL_SECONDS:-3600}

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${SPECFLOW_PYTHON:+"$SPECFLOW_PYTHON"} python3.12 python3.11 python3 python; do
        if command -v "$candidate" >/dev/null && supported "$candidate"; then command -v "$candidate"; return; fi
    done
    die "no Python 3.11 or 3.12 found (SGLang 0.5.23 needs one of them): install it, or name one with SPECFLOW_PYTHON=/path/to/python3.12"
}

# watched SECONDS LABEL LOG COMMAND...: runs the command with its output in LOG, a line of progress every 30 s, the log's
# end on failure; returns the command's status. An interruption stops the command.
watched() {
    local limit=$1 label=$2 log=$3 child status=0 begun=$SECONDS shown=$SECONDS
    shift 3
    timeout --kill-after=10 "$limit" "$@" >"$log" 2>&1 </dev/null &
    child=$!
    trap 'kill "$child" 2>/dev/null; exit 130' INT
    trap 'kill "$child" 2>/dev/null; exit 143' TERM HUP
    while kill -0 "$child" 2>/dev/null; do
        sleep 0.5
        if ((SECONDS - shown >= 30)); then
            shown=$SECONDS
            say "  $label, $((SECONDS - begun)) s: $(tail -n 1 "$log" | tr '\r' '\n' | tail -n 1 | cut -c1-100)"
        fi
    done
    wait "$child" || status=$?
    trap - INT TERM HUP
    if ((status)); then
        say "error: $label failed (status $status$( ((status == 124)) && echo ", after the limit of $limit s")). The end of $log:"
        tail -n 30 "$log" | sed 's/^/  | /' >&2
    fi
    return "$status"
}

stamp_of() { # EXTRA
    { cat "$root/pyproject.toml"; "$python" -VV; printf '%s\n' "$root" "$1"; } | sha256sum | cut -d' ' -f1
}

make_environment() { # quickstart or test
    local extra=$1 kept
    mkdir -p "$logs"
    if [ -x "$python" ]; then
        supported "$python" || die "$python is not Python 3.11 or 3.12: remove $venv, or name another with SPECFLOW_VENV"
        for kept in "$extra" test; do # The test extra holds what the quickstart needs.
            if [ "$(cat "$venv/.specflow-$kept" 2>/dev/null)" = "$(stamp_of "$kept")" ]; then return; fi
        done
    else
        local maker
        maker=$(find_python) || exit 1
        say "making $venv with $("$maker" -V)"
        "$maker" -m venv "$venv" >"$logs/venv.log" 2>&1 || {
            sed 's/^/  | /' "$logs/venv.log" >&2
            rm -f "$python" # Half made (no pip): the next run must not take it for an environment.
            die "could not make $venv (on Debian and Ubuntu: apt-get install python3-venv)"
        }
    fi
    if ! "$python" -c 'import sys, importlib.util as u; sys.exit(not u.find_spec("sglang"))'; then
        say "installing SGLang 0.5.23 and what it needs into $venv: about 8 minutes and 11 GB, once (log: $logs/install.log)"
        say "  free there: $(df -h --output=avail "$venv" | tail -n 1 | tr -d ' ')"
    fi
    watched "$install_seconds" "pip install" "$logs/install.log" \
        "$python" -m pip install --progress-bar off -e "$root[$extra]" || exit 1
    stamp_of "$extra" >"$venv/.specflow-$extra"
}

fetch_model() {
    model=$root/.cache/models/smollm2-135m-instruct
    mkdir -p "$logs"
    watched 1200 "getting SmolLM2-135M-Instruct" "$logs/model.log" "$python" "$root/launch/get_smollm2.py" "$model" || exit 1
}
