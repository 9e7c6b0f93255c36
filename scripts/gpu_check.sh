#!/usr/bin/env bash
# Prove and time the kernels and the engine on this machine's GPU in under eight minutes.
#
#     scripts/gpu_check.sh [--fetch | --dry-run]
#
# --fetch fills .wheels/ on a machine with a network with what a GPU machine may lack (no torch, no triton, no
# transformers). Without it, the check makes a venv over the machine's own packages, installs from .wheels/ alone,
# and runs four stages, each with a limit: tests of the kernels without the interpreter, tests marked gpu,
# benchmarks of the kernels, the steps of a large model. A stage that fails does not stop the next; the exit code
# is the number of stages that failed. --dry-run runs the same on a CPU, with one test and no times.
#
# Results go to $OUT (default: gpu_check/): junit reports, logs, kernels.csv, steps.csv.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

wheels=.wheels
packages=(pyzmq msgspec jsonargparse typeshed-client docstring-parser rich markdown-it-py mdurl pygments
    pytest pytest-timeout pluggy iniconfig typing-extensions psutil setuptools packaging pyyaml)
out=${OUT:-gpu_check}
python=${PYTHON:-python3}
failed=0

if [[ "${1:-}" == --fetch ]]; then
    target=${GPU_PYTHON:-3.12}
    rm -rf "$wheels"
    "$python" -m pip download --quiet --disable-pip-version-check --dest "$wheels" --no-deps -c constraints.txt \
        --only-binary=:all: --python-version "$target" --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
        --platform any "${packages[@]}"
    status=$?
    du -sh "$wheels"
    exit "$status"
fi

mkdir -p "$out"
out=$(cd "$out" && pwd)
if [[ ! -x .gpu_venv/bin/python ]]; then
    "$python" -m venv --system-site-packages .gpu_venv
fi
run=.gpu_venv/bin/python
if compgen -G "$wheels/*.whl" >/dev/null; then
    # what the machine has stays: wheels fill gaps only
    for package in "${packages[@]}"; do
        "$run" -m pip show --quiet "$package" >/dev/null 2>&1 ||
            "$run" -m pip install --quiet --no-index --no-deps --find-links "$wheels" "$package"
    done
fi
"$run" -m pip install --quiet --no-index --no-deps --no-build-isolation -e . || exit 1

stage() { # name, seconds, command...
    local name=$1 limit=$2 started=$SECONDS
    shift 2
    if timeout "$limit" "$@" >"$out/$name.log" 2>&1; then
        echo "$name: passed in $((SECONDS - started)) s"
    else
        failed=$((failed + 1))
        echo "$name: FAILED after $((SECONDS - started)) s, see $out/$name.log"
    fi
    tail -n 3 "$out/$name.log"
}

kernel_tests=(tests/test_tree_attention_triton.py tests/test_kv_write_triton.py tests/test_kv_commit_triton.py
    tests/test_coupled_sample_triton.py tests/test_verify_walk_triton.py tests/test_rejection_verify_triton.py
    tests/test_distill_loss.py)
pytest=("$run" -m pytest -q -p no:cacheprovider)

if [[ "${1:-}" == --dry-run ]]; then
    export TRITON_INTERPRET=1
    stage kernels 100 "${pytest[@]}" --junitxml "$out/kernels.xml" tests/test_verify_walk_triton.py
    stage engine 100 "${pytest[@]}" -m gpu --junitxml "$out/engine.xml" tests/test_engine_cuda.py
    stage bench 100 "$run" scripts/bench_kernels.py --dry-run --out "$out/kernels.csv"
    stage steps 100 "$run" scripts/bench_step.py --dry-run --out "$out/steps.csv"
else
    unset TRITON_INTERPRET
    stage kernels 170 "${pytest[@]}" -m "slow or not slow" --junitxml "$out/kernels.xml" "${kernel_tests[@]}"
    stage engine 130 "${pytest[@]}" -m gpu --junitxml "$out/engine.xml" tests/test_engine_cuda.py
    stage bench 90 "$run" scripts/bench_kernels.py --tests "$out/kernels.xml" --out "$out/kernels.csv"
    stage steps 60 "$run" scripts/bench_step.py --out "$out/steps.csv"
fi
echo "$failed of 4 stages failed; results in $out"
exit "$failed"
