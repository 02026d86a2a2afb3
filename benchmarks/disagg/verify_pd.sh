#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Verifies a running pair: equal answers, bytes really moved, nothing left held; prints
# a page about it. Exit status 0: passed, 1: failed, 2: could not check all.
# With EFA: written, never run.
#
#   ./verify_pd.sh --router http://10.0.0.3:8000
#   ./verify_pd.sh --help
#
# Without --router, --prefill and --decode, it takes from the environment, as
# run_sweep.sh does:
#   PREFILL_IP, DECODE_IP     addresses of both nodes; several D, separated by blanks
#   PREFILL_PORT, DECODE_PORT, PREFILL_SIDE_CHANNEL_PORT, DECODE_SIDE_CHANNEL_PORT
#   DEVICE=cpu                both engines on this machine
#   SIDE_CHANNEL_TOKEN_FILE   the engines' side_channel_token_file, if they have one
# and sends both legs of each request straight to the engines.

set -euo pipefail
# shellcheck source=benchmarks/disagg/kit_env.sh disable=SC1091
source "$(dirname "${BASH_SOURCE[0]}")/kit_env.sh"

arguments=()
named=0
for argument in "$@"; do
  case $argument in
    --router* | --prefill* | --decode* | --help | -h) named=1 ;;
  esac
done
if ((named == 0)); then
  MODEL=${MODEL:-unused} device_defaults
  [[ -n ${PREFILL_IP:-} && -n ${DECODE_IP:-} ]] ||
    die "give --router URL, or set PREFILL_IP and DECODE_IP (--help for more)"
  arguments+=(--prefill
    "http://$PREFILL_IP:$PREFILL_PORT,$PREFILL_IP:$PREFILL_SIDE_CHANNEL_PORT")
  read -ra decode_ips <<<"$DECODE_IP"
  for ip in "${decode_ips[@]}"; do
    arguments+=(--decode "http://$ip:$DECODE_PORT,$ip:$DECODE_SIDE_CHANNEL_PORT")
  done
fi
[[ -z ${SIDE_CHANNEL_TOKEN_FILE:-} ]] ||
  arguments+=(--side-channel-token-file "$SIDE_CHANNEL_TOKEN_FILE")
exec "$PYTHON" "$KIT_DIR/verify_pd.py" "${arguments[@]}" "$@"
