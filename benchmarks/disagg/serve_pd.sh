#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Starts one engine in the background, waits until /health answers 200, and says where
# its log is. cleanup.sh server ends it. On P5en: written, never run.
#
#   PREFILL_IP=10.0.0.1 DECODE_IP=10.0.0.2 ROLE=prefill MODE=push ./serve_pd.sh
#   PREFILL_IP=10.0.0.1 DECODE_IP=10.0.0.2 ROLE=decode  MODE=push ./serve_pd.sh
#
#   ROLE               prefill, decode, or single: one engine without a connector
#   MODE               push, pull, pull-inline, or single for ROLE=single
#   PREFILL_IP         the prefill node's address (ROLE=prefill and single)
#   DECODE_IP          the decode node's address (ROLE=decode)
#   DEVICE             cuda (default) or cpu: both engines on this machine, with a small
#                      random model
#   CACHES             off (default): no prefix caching on D, as published; on: on both
#   MODEL, SERVED_MODEL_NAME, TP_SIZE, MAX_MODEL_LEN, MAX_NUM_SEQS, BLOCK_SIZE
#   PREFILL_PORT, DECODE_PORT, PREFILL_SIDE_CHANNEL_PORT, DECODE_SIDE_CHANNEL_PORT
#   ENGINE_NUMBER      1 (default); further decode engines are 2, 3, ...
#   BACKENDS           NIXL backends, separated by blanks: LIBFABRIC on cuda, UCX on cpu
#   EXTRA_CONFIG       more keys of kv_connector_extra_config, as a JSON object
#   EXTRA_ARGS         more arguments of vllm serve, separated by blanks
#   LOG_DIR            default: logs
#   STATE_DIR          where cleanup.sh finds what runs
#   START_TIMEOUT      seconds until it must answer: 1800
#   DRY_RUN=1          prints the command, with the variables that it needs, instead

set -euo pipefail
# shellcheck source=benchmarks/disagg/kit_env.sh disable=SC1091
source "$(dirname "${BASH_SOURCE[0]}")/kit_env.sh"

ROLE=${ROLE:-}
MODE=${MODE:-}
one_of ROLE "$ROLE" prefill decode single
device_defaults
ENGINE_NUMBER=${ENGINE_NUMBER:-1}
[[ $ENGINE_NUMBER =~ ^[1-9][0-9]*$ ]] ||
  die "ENGINE_NUMBER is '$ENGINE_NUMBER', expected a whole number from 1"

connector='' inline=false
case $ROLE-$MODE in
  single-single) ;;
  prefill-push | decode-push) connector=NixlPushConnector ;;
  prefill-pull | decode-pull) connector=NixlConnector ;;
  prefill-pull-inline | decode-pull-inline) connector=NixlConnector inline=true ;;
  *) die "MODE is '$MODE' for ROLE $ROLE, expected push, pull or pull-inline for" \
    "prefill and decode, single for single" ;;
esac

case $ROLE in
  decode)
    host=${DECODE_IP:-} variable=DECODE_IP port=$DECODE_PORT
    side_channel_port=$DECODE_SIDE_CHANNEL_PORT kv_role=kv_consumer
    ;;
  *)
    host=${PREFILL_IP:-} variable=PREFILL_IP port=$PREFILL_PORT
    side_channel_port=$PREFILL_SIDE_CHANNEL_PORT kv_role=kv_producer
    ;;
esac
[[ -n $host ]] || die "$variable is not set; give this node's address, at which the" \
  "other node reaches it"

name=$ROLE
((ENGINE_NUMBER == 1)) || name=$ROLE-$ENGINE_NUMBER

# Names of the variables that are set for the engine.
environment=()
# shellcheck disable=SC2153 # device_defaults sets MODEL
command=(
  "$PYTHON" -P -m vllm.entrypoints.cli.main serve "$MODEL"
  --served-model-name "$SERVED_MODEL_NAME"
  --port "$port"
  --tensor-parallel-size "$TP_SIZE"
)
if [[ $DEVICE == cuda ]]; then
  BACKENDS=${BACKENDS:-LIBFABRIC}
  command+=(
    --host 0.0.0.0
    --dtype bfloat16
    --max-model-len "${MAX_MODEL_LEN:-32768}"
    --max-num-seqs "${MAX_NUM_SEQS:-8}"
  )
else
  BACKENDS=${BACKENDS:-UCX}
  BLOCK_SIZE=${BLOCK_SIZE:-32}
  command+=(
    --host "$host"
    --dtype float32
    --max-model-len "${MAX_MODEL_LEN:-4096}"
    --max-num-seqs "${MAX_NUM_SEQS:-16}"
    --enforce-eager
  )
  # Two engines share few cores.
  export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind}
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
  export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
  export VLLM_NO_USAGE_STATS=${VLLM_NO_USAGE_STATS:-1}
  environment+=(
    VLLM_CPU_OMP_THREADS_BIND OMP_NUM_THREADS VLLM_CPU_KVCACHE_SPACE
    HF_HUB_OFFLINE VLLM_NO_USAGE_STATS
  )
fi
[[ -z ${BLOCK_SIZE:-} ]] || command+=(--block-size "$BLOCK_SIZE")

if [[ $CACHES == off && $ROLE != prefill ]]; then
  command+=(--no-enable-prefix-caching)
else
  command+=(--enable-prefix-caching)
fi

if [[ -n $connector ]]; then
  engine_id=$(printf '%s-engine-%03d' "$ROLE" "$ENGINE_NUMBER")
  transfer=$("$PYTHON" "$KIT_DIR/kit_transfer_config.py" \
    --connector "$connector" --role "$kv_role" --engine-id "$engine_id" \
    --device "$DEVICE" --backends "$BACKENDS" --inline "$inline" \
    --extra "${EXTRA_CONFIG:-}")
  command+=(--kv-transfer-config "$transfer")
  export VLLM_NIXL_SIDE_CHANNEL_HOST=$host
  export VLLM_NIXL_SIDE_CHANNEL_PORT=$side_channel_port
  environment+=(VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT)
fi

read -ra extra_args <<<"${EXTRA_ARGS:-}"
command+=("${extra_args[@]}")

if [[ ${DRY_RUN:-} == 1 ]]; then
  for name in "${environment[@]}"; do
    printf '%s=%q ' "$name" "${!name}"
  done
  printf '%q ' "${command[@]}"
  echo
  exit
fi
exec "$PYTHON" "$KIT_DIR/kit_processes.py" start --state-dir "$STATE_DIR" \
  --name "$name" --log "${LOG_DIR:-logs}/$MODE-$name.log" \
  --health "http://$host:$port/health" --timeout "$START_TIMEOUT" -- "${command[@]}"
