#!/usr/bin/env bash
# cuda_generic_test under the four compute-sanitizer tools, on the few drawn cases that together reach every kernel of the
# library; runs on the machine with the GPU. Logs for tools/record_reliability.py, which lists what they have reached.
#
#   sanitize.sh PROGRAM FOLDER SECONDS [RACE_PROGRAM]
#
# FOLDER: where the logs go. SECONDS: when what has not ended is ended. RACE_PROGRAM: the same program built for racecheck
# (-DFLASH_QLA_RACECHECK, src/cuda/common/mbarrier.cuh); without it racecheck leaves the Hopper kernels out.
set -uo pipefail
program=$1 out=$2 end=$((SECONDS + $3)) race=${4:-}
failed=$(mktemp)

# tool TOOL NAME OPTIONS...
tool() {
  local begin=$SECONDS log="$out/sanitize_$1_$2.txt" run=$program
  local tool_options=(--tool "$1" --error-exitcode 1)
  if [[ $1 == racecheck ]]; then
    [[ -n $race ]] && run=$race
    # The tool does not get through this kernel, whose blocks exchange shared memory in clusters.
    [[ $2 == backward* ]] && tool_options+=(--kernel-name-exclude kns=bwd_gradients)
  fi
  local command=("$run" --kernels --small --once "${@:3}")
  echo "== compute-sanitizer ${tool_options[*]} ${command[*]}" >"$log"
  timeout "$((end - SECONDS))" compute-sanitizer "${tool_options[@]}" --print-limit 8 "${command[@]}" >>"$log" 2>&1 ||
    echo "$1 $2" >>"$failed"
  echo "-- $((SECONDS - begin)) s" >>"$log"
  echo "$1 $2: $(grep -hE 'SUMMARY|returned an error' "$log" | tr '\n' ' ')$(grep -c '^launched' "$log") kernels, $((SECONDS - begin)) s"
}

# The drawn cases are those that reach kernels that no other does, as --kernels tells of one after another; for racecheck,
# which takes a hundred times as long as the program alone, the smallest of them, and no repeats.
for name in memcheck synccheck initcheck; do
  tool "$name" generic_a --only generic --only-case 0,5,9 &
  tool "$name" generic_b --only generic --only-case 11,27,45 &
  tool "$name" decode --only decode --cases 160 --only-case 9,13,16,25,32,36,54,61,62,63,76,79,87,99,101,104,110,111,125,131,138,144,146,159 &
  tool "$name" oracle --only oracle --cases 12 &
  tool "$name" backward --only "sm90 backward, drawn" --only-case 0,1,2,5,16 &
  tool "$name" backward_segments --only "sm90 backward, segments" --cases 4 &
  tool "$name" backward_one --only "sm90 backward, one" &
  tool "$name" split --only "sm90 split, drawn" --cases 4 &
  tool "$name" split_repeats --only "sm90 split, repeats" &
  tool "$name" batch --only "sm90 forward, batch" &
  tool "$name" forward --only "sm90 forward, drawn" --cases 12 &
  tool "$name" forward_repeats --only "sm90 forward, repeats" &
done
tool racecheck generic_a --only generic --only-case 40,66,74,88,108,120,134,137 &
tool racecheck generic_b --only generic --only-case 6,78,90,97,99,121,130,142 &
tool racecheck generic_c --only generic --only-case 9,10,20,23,25,27,118,136,144 &
tool racecheck generic_d --only generic --only-case 11,45 &
tool racecheck decode --only decode --cases 160 --only-case 9,13,16,25,32,36,54,61,62,63,76,79,87,99,101,104,110,111,125,131,138,144,146,159 &
tool racecheck oracle --only oracle --cases 3 &
if [[ -n $race ]]; then
  for number in 0 1 2 5 16; do tool racecheck "backward_$number" --only "sm90 backward, drawn" --only-case "$number" & done
  for number in 0 1; do tool racecheck "backward_segments_$number" --only "sm90 backward, segments" --only-case "$number" & done
  tool racecheck backward_one --only "sm90 backward, one" &
  tool racecheck split --only "sm90 split, drawn" --cases 4 &
  tool racecheck batch --only "sm90 forward, batch" &
  tool racecheck single --only "sm90 forward, single" &
fi
wait
count=$(wc -l <"$failed")
rm -f "$failed"
echo "$count sanitizer runs with reports, failed checks or no time to end"
((count == 0))
