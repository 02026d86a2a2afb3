#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Measures a grid of loads and prompt lengths on engines that serve_pd.sh has started,
# through the proxy of the mode, with vllm bench serve. Run it again after an
# interruption: what is measured and proven is not measured again. It ends what it has
# started, and nothing else. On P5en: written, never run.
#
#   VLLM_SRC=~/vllm PREFILL_IP=10.0.0.1 DECODE_IP=10.0.0.2 MODE=push ./run_sweep.sh
#
#   MODE               push, pull, pull-early (the proxy chooses D before prefill),
#                      pull-inline, single (PREFILL_IP is the engine), or three-way:
#                      push, pull and single in turn (needs START_SERVERS=1)
#   QPS_LIST           requests per second, separated by blanks: "1 2 4 8"
#   INPUT_LENS         "1024 4096 16384"; 1024-16384 mixes lengths between the two
#   OUTPUT_LENS        "128"; 16-512 mixes as above
#   ITERATIONS         how often the whole grid is measured: 3
#   NUM_PROMPTS        requests at each point: 100
#   PREFIX_LEN         so many tokens more that all prompts of a point begin with: 0
#   CACHES             as in serve_pd.sh
#   RESULTS_DIR        results
#   DECODE_IP          several addresses, separated by blanks, are several D
#   START_SERVERS=1    starts the engines here, and ends them (default with DEVICE=cpu)
#   POINT_TIMEOUT      seconds that a point may take beyond its arrivals: 1800
#   PROXY_PORT         8000
#   PROXY_ARGS         more options of the proxy, such as "--rebind-after 0.1"
#   SIDE_CHANNEL_TOKEN_FILE   the engines' side_channel_token_file, if they have one
#   PREFILL_ENGINE_ID, PREFILL_KV_HOST, PREFILL_TP_SIZE, PREFILL_PP_SIZE
#                      what the push proxy says of P; defaults as in serve_pd.sh
#   NO_LOCK=1          DEVICE=cpu only: do not wait until no tests run engines here
#   Everything else as in serve_pd.sh, with the same values.

set -euo pipefail
# shellcheck source=benchmarks/disagg/kit_env.sh disable=SC1091
source "$(dirname "${BASH_SOURCE[0]}")/kit_env.sh"

MODE=${MODE:-}
one_of MODE "$MODE" push pull pull-early pull-inline single three-way
device_defaults
[[ -n ${PREFILL_IP:-} ]] || die "PREFILL_IP is not set; give the prefill node's address"
[[ -n ${DECODE_IP:-} || $MODE == single ]] ||
  die "DECODE_IP is not set; give the decode node's address"
if [[ $DEVICE == cuda ]]; then
  START_SERVERS=${START_SERVERS:-0} NUM_PROMPTS=${NUM_PROMPTS:-100}
  QPS_LIST=${QPS_LIST:-1 2 4 8} INPUT_LENS=${INPUT_LENS:-1024 2048 4096 8192 16384}
  OUTPUT_LENS=${OUTPUT_LENS:-128}
else
  START_SERVERS=${START_SERVERS:-1} NUM_PROMPTS=${NUM_PROMPTS:-10}
  QPS_LIST=${QPS_LIST:-1 2} INPUT_LENS=${INPUT_LENS:-256 1024}
  OUTPUT_LENS=${OUTPUT_LENS:-32}
fi
one_of START_SERVERS "$START_SERVERS" 0 1
RESULTS_DIR=${RESULTS_DIR:-results}
LOG_DIR=${LOG_DIR:-logs}
PROXY_PORT=${PROXY_PORT:-8000}
PROXIES=$VLLM_SRC/examples/disaggregated/disaggregated_serving
[[ -d $PROXIES ]] || die "VLLM_SRC is '$VLLM_SRC', expected a checkout with the proxies"
read -ra decode_ips <<<"${DECODE_IP:-}"
modes=("$MODE")
[[ $MODE != three-way ]] || modes=(push pull single)
if [[ $MODE == three-way && $START_SERVERS == 0 ]]; then
  die "MODE is three-way, but the engines of its modes differ and START_SERVERS is 0:" \
    "run push, pull and single one after the other with the same RESULTS_DIR, and" \
    "serve_pd.sh with the same MODE before each"
fi
export DEVICE CACHES MODEL SERVED_MODEL_NAME TP_SIZE PREFILL_IP PYTHON STATE_DIR LOG_DIR
export PREFILL_PORT DECODE_PORT PREFILL_SIDE_CHANNEL_PORT DECODE_SIDE_CHANNEL_PORT
export START_TIMEOUT

# What this run has started, and the names of what it waits for, by process id.
started=()
declare -A awaited=()

# launch NAME COMMAND...: in the background, so that interrupts are heard at once.
launch() {
  local name=$1
  shift
  "$@" &
  awaited[$!]=$name
}

# Waits for all that was launched. A server counts as started once it is ready; one
# that does not get so far is ended by the command that starts it.
settle() {
  local pid name result status=0
  for pid in "${!awaited[@]}"; do
    name=${awaited[$pid]} result=0
    wait "$pid" || result=$?
    unset "awaited[$pid]"
    if ((result != 0)); then
      status=$result
    elif [[ $name != sweep ]]; then
      started+=("$name")
    fi
  done
  return "$status"
}

stop_started() {
  local name arguments=()
  for name in "${started[@]}"; do
    arguments+=(--name "$name")
  done
  started=()
  ((${#arguments[@]} == 0)) ||
    "$PYTHON" "$KIT_DIR/kit_processes.py" stop --state-dir "$STATE_DIR" \
      "${arguments[@]}"
}

# shellcheck disable=SC2329 # called by the trap
finish() {
  local status=$?
  trap - EXIT INT TERM HUP
  if ((${#awaited[@]} > 0)); then
    kill -TERM "${!awaited[@]}" 2>/dev/null || true
    settle || true
  fi
  stop_started || status=1
  exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

sweep() {
  local what=$1 mode=$2 base engine ip
  base=http://127.0.0.1:$PROXY_PORT
  engine=http://$PREFILL_IP:$PREFILL_PORT
  local arguments=(
    --label "$mode" --results "$RESULTS_DIR"
    --qps "$QPS_LIST" --input-lens "$INPUT_LENS" --output-lens "$OUTPUT_LENS"
    --iterations "${ITERATIONS:-3}" --num-prompts "$NUM_PROMPTS"
    --prefix-len "${PREFIX_LEN:-0}" --device "$DEVICE" --model "$MODEL"
    --served-model-name "$SERVED_MODEL_NAME" --tp-size "$TP_SIZE" --caches "$CACHES"
    --point-timeout "${POINT_TIMEOUT:-1800}"
    --token-file "${SIDE_CHANNEL_TOKEN_FILE:-}"
    --engine-options "${EXTRA_CONFIG:-} ${EXTRA_ARGS:-} ${BLOCK_SIZE:-}${PROXY_ARGS:+ $PROXY_ARGS}"
  )
  if [[ $mode == single ]]; then
    arguments+=(--base-url "$engine" --prefill "$engine")
  else
    engine+=,$PREFILL_IP:$PREFILL_SIDE_CHANNEL_PORT
    arguments+=(--base-url "$base" --prefill "$engine")
    for ip in "${decode_ips[@]}"; do
      arguments+=(
        --decode "http://$ip:$DECODE_PORT,$ip:$DECODE_SIDE_CHANNEL_PORT"
      )
    done
  fi
  # Replaces its subshell, so that a signal reaches it.
  exec "$PYTHON" "$KIT_DIR/sweep.py" "$what" "${arguments[@]}"
}

# shellcheck disable=SC2329 # called through launch
serve() {
  ROLE=$1 MODE=$2 DECODE_IP=${3:-} ENGINE_NUMBER=1 exec "$KIT_DIR/serve_pd.sh"
}

start_servers() {
  local mode=${1/-early/}
  if [[ $mode == single ]]; then
    launch single serve single single
    settle
    return
  fi
  ((${#decode_ips[@]} == 1)) ||
    die "START_SERVERS is 1, but DECODE_IP names ${#decode_ips[@]} engines; start" \
      "them with serve_pd.sh, then set START_SERVERS=0"
  launch prefill serve prefill "$mode"
  launch decode serve decode "$mode" "${decode_ips[0]}"
  settle
}

start_proxy() {
  local mode=$1 script=disagg_proxy_demo.py ip arguments=()
  for ip in "${decode_ips[@]}"; do
    arguments+=(
      --decode "$ip:$DECODE_PORT"
      --decode-side-channel "$ip:$DECODE_SIDE_CHANNEL_PORT"
    )
  done
  case $mode in
    push)
      script=disagg_proxy_pushconnector_demo.py
      arguments+=(
        --prefill-engine-id "${PREFILL_ENGINE_ID:-prefill-engine-001}"
        --prefill-kv-host "${PREFILL_KV_HOST:-$PREFILL_IP}"
        --prefill-side-channel-port "$PREFILL_SIDE_CHANNEL_PORT"
        --prefill-tp-size "${PREFILL_TP_SIZE:-$TP_SIZE}"
        --prefill-pp-size "${PREFILL_PP_SIZE:-1}"
      )
      ;;
    *)
      arguments+=(--prefill-side-channel "$PREFILL_IP:$PREFILL_SIDE_CHANNEL_PORT")
      ;;
  esac
  [[ $mode != pull-early ]] || arguments+=(--decode-choice early)
  local more
  read -ra more <<<"${PROXY_ARGS:-}"
  arguments+=("${more[@]}")
  if [[ -n ${SIDE_CHANNEL_TOKEN_FILE:-} ]]; then
    arguments+=(--side-channel-token-file "$SIDE_CHANNEL_TOKEN_FILE")
  fi
  mkdir -p "$RESULTS_DIR"
  launch proxy "$PYTHON" "$KIT_DIR/kit_processes.py" start --state-dir "$STATE_DIR" \
    --name proxy --log "$LOG_DIR/$mode-proxy.log" \
    --health "http://127.0.0.1:$PROXY_PORT/ready" --timeout 120 -- \
    "$PYTHON" "$PROXIES/$script" --host 127.0.0.1 --port "$PROXY_PORT" \
    --model "$SERVED_MODEL_NAME" --prefill "$PREFILL_IP:$PREFILL_PORT" \
    --choice-log "$RESULTS_DIR/$mode.choices.jsonl" "${arguments[@]}"
  settle
}

status=0
for mode in "${modes[@]}"; do
  remaining=$(sweep plan "$mode")
  if ((remaining == 0)); then
    echo "$mode: all points are measured and proven already, in $RESULTS_DIR"
    continue
  fi
  if [[ $DEVICE == cpu && $START_SERVERS == 1 && -z ${NO_LOCK:-} ]]; then
    exec 9>>"${TMPDIR:-/tmp}/kvfork-engines.lock"
    flock -n 9 || echo "waiting until no other test runs engines on this machine"
    flock -w 1800 9 || die "other tests have run engines here for 1800 s; try later"
  fi
  [[ $START_SERVERS == 0 ]] || start_servers "$mode"
  # Before the proxy, which would only wait for engines that are not there.
  (sweep check "$mode")
  [[ $mode == single ]] || start_proxy "$mode"
  launch sweep sweep run "$mode"
  settle || status=$?
  stop_started || status=1
done
exit "$status"
