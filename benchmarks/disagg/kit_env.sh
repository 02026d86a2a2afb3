# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2034
#
# Sourced by serve_pd.sh, run_sweep.sh and cleanup.sh: what they must agree on. Every
# value can be set in the environment.

KIT_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
VLLM_SRC=${VLLM_SRC:-$(cd "$KIT_DIR/../.." && pwd)}
if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  [[ ! -x $VLLM_SRC/.venv/bin/python ]] || PYTHON=$VLLM_SRC/.venv/bin/python
fi
# One folder for each machine, because homes may be shared between nodes.
STATE_DIR=${STATE_DIR:-${XDG_STATE_HOME:-$HOME/.local/state}/vllm-pd-kit/$HOSTNAME}
START_TIMEOUT=${START_TIMEOUT:-1800}

die() {
  echo "${0##*/}: $*" >&2
  exit 2
}

# one_of NAME VALUE ALLOWED...
one_of() {
  local name=$1 value=$2 allowed
  shift 2
  for allowed in "$@"; do
    [[ $value != "$allowed" ]] || return 0
  done
  die "$name is '$value', expected one of: $*"
}

# Sets what P5en and this machine differ in.
device_defaults() {
  DEVICE=${DEVICE:-cuda}
  one_of DEVICE "$DEVICE" cuda cpu
  CACHES=${CACHES:-off}
  one_of CACHES "$CACHES" off on
  SERVED_MODEL_NAME=${SERVED_MODEL_NAME:-Qwen}
  PREFILL_PORT=${PREFILL_PORT:-8100}
  DECODE_PORT=${DECODE_PORT:-8200}
  PREFILL_SIDE_CHANNEL_PORT=${PREFILL_SIDE_CHANNEL_PORT:-5600}
  if [[ $DEVICE == cuda ]]; then
    MODEL=${MODEL:-Qwen/Qwen3-32B}
    TP_SIZE=${TP_SIZE:-8}
    DECODE_SIDE_CHANNEL_PORT=${DECODE_SIDE_CHANNEL_PORT:-5600}
    return
  fi
  [[ -n ${MODEL:-} ]] || MODEL=$("$PYTHON" "$KIT_DIR/sweep.py" model)
  TP_SIZE=${TP_SIZE:-1}
  PREFILL_IP=${PREFILL_IP:-127.0.0.1}
  DECODE_IP=${DECODE_IP:-127.0.0.1}
  # Both engines share the machine.
  DECODE_SIDE_CHANNEL_PORT=${DECODE_SIDE_CHANNEL_PORT:-5601}
}
