#!/usr/bin/env bash
# cuda_generic_test under the four compute-sanitizer tools, on the few drawn cases that together reach every kernel of the
# library; runs on the machine with the GPU. Logs for tools/record_reliability.py, which lists what they have reached.
#
#   sanitize.sh PROGRAM FOLDER SECONDS [RACE_PROGRAM]
#
# FOLDER: where the logs go. SECONDS: when what has not ended is ended. RACE_PROGRAM: the same program built for racecheck
# (-DFLASH_QLA_RACECHECK, src/cuda/common/mbarrier.cuh); without it racecheck leaves the Hopper kernels out, and initcheck reports
# what the backward's copies have written.
# FLASH_QLA_SANITIZE: an extended regular expression; only the runs whose "TOOL NAME" it matches ("sm90" are those named
# backward, split, lengths, batch, single, forward, links or malformed).
set -uo pipefail
program=$1 out=$2 end=$((SECONDS + $3)) race=${4:-}
wanted=${FLASH_QLA_SANITIZE:-.}
[[ $wanted == sm90 ]] && wanted='(backward|split|lengths|batch|single|forward|links|malformed)'
failed=$(mktemp)
workers=$(nproc) running=0

# tool TOOL NAME OPTIONS...
tool() {
  local begin=$SECONDS log="$out/sanitize_$1_$2.txt" run=$program
  local tool_options=(--tool "$1" --error-exitcode 1)
  # Under a tool the device's oracle takes most of the time: it has runs of its own. initcheck must see all that is written,
  # but for links, of which no kernel reads what the oracle has written.
  [[ ($1 != initcheck || $2 == links*) && $2 != oracle* ]] && tool_options+=(--kernel-name-exclude kns=oracle)
  # A call that asks for its lengths has a card's work in it, too much for racecheck but for the kernel that asks.
  [[ $1 == racecheck && $2 == lengths ]] && tool_options=("${tool_options[@]:0:4}" --kernel-name kns=read_lengths)
  if [[ $1 == racecheck ]]; then
    [[ -n $race ]] && run=$race
    # The tool fails, with an internal error, where one stream's kernels run beside another's.
    [[ $2 == backward* || $2 == links_backward* ]] && tool_options+=(--force-blocking-launches)
  fi
  # What goes past the end of an allocation is not to end in the next one.
  [[ $2 == malformed* ]] && tool_options+=(--padding 4096)
  # Nor does initcheck see all that the copy engine writes to memory; that build shows it (src/cuda/common/bulk.cuh).
  [[ $1 == initcheck && ($2 == backward* || $2 == links*) && -n $race ]] && run=$race
  # The tests of links copy o, which the copy engine has written, to where the whole stream's is.
  [[ $1 == initcheck && $2 == links* ]] && tool_options+=(--check-api-memory-access no)
  local command=("$run" --kernels --small --once "${@:3}")
  echo "== compute-sanitizer ${tool_options[*]} ${command[*]}" >"$log"
  timeout "$((end > SECONDS ? end - SECONDS : 1))" compute-sanitizer "${tool_options[@]}" --print-limit 8 "${command[@]}" >>"$log" 2>&1 ||
    echo "$1 $2" >>"$failed"
  echo "-- $((SECONDS - begin)) s" >>"$log"
  echo "$1 $2: $(grep -hE 'SUMMARY|returned an error' "$log" | tr '\n' ' ')$(grep -c '^launched' "$log") kernels, $((SECONDS - begin)) s"
}

# The same, beside others: as many as there are cores.
start() {
  [[ "$1 $2" =~ $wanted ]] || return 0
  if ((running >= workers)); then
    wait -n
    running=$((running - 1))
  fi
  tool "$@" &
  running=$((running + 1))
}

# The drawn cases are those that reach kernels that no other does, as --kernels tells of one after another; for racecheck,
# which takes a hundred times as long as the program alone, the smallest of them, a process each. The longest first, but
# those that take minutes under racecheck last: a run that has not their time has all others.
decode_cases=9,13,16,25,32,36,54,61,62,63,76,79,87,99,101,104,110,111,125,131,138,144,146,159
start racecheck decode --only decode --cases 160 --only-case $decode_cases
for number in 0 1 2; do start racecheck "oracle_$number" --only oracle --cases 9 --only-case "$number"; done
if [[ -n $race ]]; then
  start racecheck lengths --only "sm90 lengths"
  start racecheck batch --only "sm90 forward, batch"
  for number in 1 6 7 10 14 15 16 17 18 19 20 35; do start racecheck "forward_stale_$number" --only "sm90 forward, stale" --only-case "$number"; done
  start racecheck forward_pairs --only "sm90 forward, stale" --only-case 45
  start racecheck forward_all_exact --only "sm90 forward, stale" --only-case 48
  start racecheck forward_repeats --only "sm90 forward, repeats"
  start racecheck forward_shared --only "sm90 forward, shared"
  start racecheck forward_checkpoints --only "sm90 forward, checkpoints"
  for number in 1 2 5 16; do start racecheck "backward_$number" --only "sm90 backward, drawn" --only-case "$number"; done
  for number in 0 1; do start racecheck "backward_segments_$number" --only "sm90 backward, segments" --only-case "$number"; done
  for number in 1 2 3; do start racecheck "split_$number" --only "sm90 split, drawn" --only-case "$number"; done
  for number in 2 4 5; do start racecheck "links_alone_$number" --only "sm90 links, alone" --only-case "$number"; done
  for number in 0 1 2 3; do start racecheck "links_forward_$number" --only "sm90 links, forward" --only-case "$number"; done
  for number in 0 2; do start racecheck "links_backward_$number" --only "sm90 links, backward" --only-case "$number"; done
fi
# 32 malformed calls of the Hopper kernels, 24 of links between ranks and 4 of others to each seed: 960 in all.
for seed in {1..16}; do start memcheck "malformed_$seed" --only malformed --cases 8 --seed "$seed"; done
for name in initcheck memcheck synccheck; do
  start "$name" lengths --only "sm90 lengths"
  start "$name" decode --only decode --cases 160 --only-case $decode_cases
  start "$name" split_repeats --only "sm90 split, repeats"
  start "$name" forward_repeats --only "sm90 forward, repeats"
  start "$name" forward_shared --only "sm90 forward, shared"
  start "$name" forward_checkpoints --only "sm90 forward, checkpoints"
  start "$name" forward_stale --only "sm90 forward, stale"
  start "$name" forward_pairs --only "sm90 forward, stale" --only-case 45,47
  start "$name" forward_joint --only "sm90 forward, stale" --only-case 48,51
  # initcheck a case at a time: what one has written counts as written for those after it.
  if [[ $name == initcheck ]]; then
    for number in 0 1 3 4 5 6 7 8 9 10 11 12 13 14; do
      start initcheck "backward_stale_$number" --only "sm90 backward, stale" --only-case "$number"
    done
  else
    start "$name" backward_stale --only "sm90 backward, stale"
  fi
  start "$name" backward_runs --only "sm90 backward, stale" --only-case 2
  start "$name" batch --only "sm90 forward, batch"
  start "$name" forward --only "sm90 forward, drawn" --cases 12
  start "$name" backward_one --only "sm90 backward, one"
  start "$name" backward_many --only "sm90 backward, many"
  start "$name" backward --only "sm90 backward, drawn" --only-case 0,1,2,5,16
  start "$name" backward_segments --only "sm90 backward, segments" --cases 4
  start "$name" split --only "sm90 split, drawn" --cases 4
  start "$name" links_alone --only "sm90 links, alone"
  start "$name" links_forward --only "sm90 links, forward"
  start "$name" links_backward --only "sm90 links, backward"
  start "$name" links_carry --only "sm90 links, carry"
  start "$name" generic_a --only generic --only-case 0,5,9
  start "$name" generic_b --only generic --only-case 11,27,45
  start "$name" generic_fp32 --only generic --only-case 20,66,78,100,118,124,134,137
  start "$name" oracle --only oracle --cases 12
  # A case of these is one for each head dimension and dtype.
  start "$name" sm80_forward --only "sm80 forward, drawn" --cases 4
  start "$name" sm80_cut --only "sm80 forward, cut" --cases 2
  start "$name" sm80_listed --only "sm80 forward, listed" --cases 2
  start "$name" sm80_backward --only "sm80 backward, drawn" --cases 3
done
for number in 0 1; do
  start racecheck "sm80_forward_$number" --only "sm80 forward, drawn" --only-case "$number"
  start racecheck "sm80_backward_$number" --only "sm80 backward, drawn" --only-case "$number"
done
start racecheck sm80_cut --only "sm80 forward, cut" --only-case 0
for number in 6 9 10 11 20 23 25 27 40 45 66 74 78 88 90 97 99 108 118 120 121 130 134 136 137 142 144; do
  start racecheck "generic_$number" --only generic --only-case "$number"
done
if [[ -n $race ]]; then
  for number in 0 1 2 4 5 6 7 9 10 11; do start racecheck "forward_$number" --only "sm90 forward, drawn" --only-case "$number"; done
  start racecheck single --only "sm90 forward, single"
  start racecheck backward_one --only "sm90 backward, one"
  for number in 4 2 11 5 12 6 0 1 14 7 8 3 9 10 13 15; do start racecheck "backward_stale_$number" --only "sm90 backward, stale" --only-case "$number"; done
fi
wait
count=$(wc -l <"$failed")
rm -f "$failed"
echo "$count sanitizer runs with reports, failed checks or no time to end"
((count == 0))
