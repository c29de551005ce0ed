#!/bin/bash
# Runs what needs GPUs, from the root of a checkout: tests/gpu/run.sh [PART...]
#
#   contract   the driver contract and the CUDA driver's own tests
#   daemon     a vmmd with the CUDA driver and its clients
#   kernels    the other tests that need a GPU
#   manager    the manager's own time, for which no GPU is needed
#   driver     benches of the CUDA driver
#   growth     benches of a daemon: growth, opening, refilling, filling, at rest
#   kernels-bench  the other benches that need a GPU
#   tests/.../FILE.py  what of a file needs a GPU
#
# Without a part all of them; each is run to its end, or for PART_TIMEOUT_S (550).
# A short summary is printed last. Logs and results are in build/gpu; where OUT is
# set, also in $OUT/gpu.tar.gz after each part. STRATA_COMMIT names the commit
# where the tree is no repository.
set -uo pipefail

cd "$(dirname "$0")/../.." || exit 2
out=$PWD/build/gpu
mkdir -p "$out/results"
export STRATA_REQUIRE_GPU=1 STRATA_BENCH_RESULTS=$out/results PYTHONUNBUFFERED=1
export PYTHONPATH=$PWD:$PWD/protos:$PWD/kernels:$out/site${PYTHONPATH:+:$PYTHONPATH}

# a checkout that is not installed has no version, which the daemon shows
if ! python3 -c 'import importlib.metadata as m; m.version("strata-vmm")' 2>/dev/null; then
  mkdir -p "$out/site/strata_vmm-0.dist-info"
  printf 'Metadata-Version: 2.1\nName: strata-vmm\nVersion: 0\n' >"$out/site/strata_vmm-0.dist-info/METADATA"
fi

declare -A tests=(
  [contract]="-m gpu tests/unit tests/gpu/test_cuda_driver.py"
  [daemon]="-m gpu tests/gpu/test_daemon.py"
  [kernels]="-m gpu tests/kernels tests/gpu --ignore=tests/gpu/test_daemon.py --ignore=tests/gpu/test_cuda_driver.py"
  [manager]="-s -m bench tests/bench/test_manager.py"
  [driver]="-s -m bench tests/bench/test_cuda_driver.py"
  [growth]="-s -m bench tests/bench/test_cuda_growth.py"
  [kernels-bench]="-s -m bench&gpu tests/bench --ignore=tests/bench/test_cuda_driver.py --ignore=tests/bench/test_cuda_growth.py"
)
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(contract daemon kernels manager driver growth kernels-bench)

failed=0
summary=()
part_pid=
trap '[ -z "$part_pid" ] || kill -TERM -- "-$part_pid" 2>/dev/null' EXIT
for at in "${!parts[@]}"; do
  part=${parts[at]}
  if [ -f "$part" ]; then
    selected="-s -m gpu $part"
    part=$(basename "$part" .py)
    parts[at]=$part
  elif [ -n "${tests[$part]:-}" ]; then
    selected=${tests[$part]}
  else
    echo "run.sh: no part $part; there are ${!tests[*]}, and files" >&2
    exit 2
  fi
  read -ra arguments <<<"$selected"
  arguments=("${arguments[@]/bench&gpu/bench and gpu}")
  began=$SECONDS
  # a thread ends a test that is over its time also while it waits within the driver, and with it the part
  timeout "${PART_TIMEOUT_S:-550}" python3 -m pytest -q --durations=5 -p no:cacheprovider -o timeout_method=thread \
    "${arguments[@]}" >"$out/$part.log" 2>&1 &
  part_pid=$!
  wait $part_pid
  status=$?
  # what is left of a part that was cut off, in its process group: a daemon that holds the GPUs, for instance
  kill -TERM -- "-$part_pid" 2>/dev/null && sleep 2
  part_pid=
  # 5: nothing to run in this part
  if [ $status -ne 0 ] && [ $status -ne 5 ]; then
    failed=1
    grep -E "^E  +[A-Z][A-Za-z.]*:|^E +assert |^(FAILED|ERROR) " "$out/$part.log" | cut -c1-250 | uniq | head -40
  fi
  grep -E "^SKIPPED" "$out/$part.log" | cut -c1-200
  summary+=("$part: $(tail -n1 "$out/$part.log") [status $status, $((SECONDS - began)) s]")
  [ -z "${OUT:-}" ] || tar -C "$out" --exclude=./site -czf "$OUT/gpu.tar.gz" .
done

for part in "${parts[@]}"; do
  grep -hE "^[a-z0-9-]+ on [^,]+, |^  [^ ].{57,} +[-0-9.e+]+ ([a-zA-Z/%]+ |  )" "$out/$part.log"
done
printf '%s\n' "${summary[@]}"
exit $failed
