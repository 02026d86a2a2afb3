#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Starts one engine of the multi-turn benchmark on a p5en.48xlarge: written, never run.
# It needs tensor-parallel size 8, which the connectors refuse at start-up so far.
#
#   HOST_IP=10.0.0.1 ROLE=prefill MODE=push MODEL=Qwen/Qwen3-32B ./serve_multiturn_p5en.sh
#   HOST_IP=10.0.0.2 ROLE=decode  MODE=push MODEL=Qwen/Qwen3-32B ./serve_multiturn_p5en.sh
#
#   HOST_IP           this node's address, at which the other engine reaches it
#   ROLE              prefill or decode
#   MODE              push or pull, the same on both nodes
#   MODEL             Qwen/Qwen3-32B or zai-org/GLM-5-FP8
#   P_PREFIX_CACHING  off (as published) or on; for ROLE=prefill
#   DRY_RUN=1         prints the command instead
#
# Prefill listens on 8100, decode on 8200, both side channels on 5600. Then, on a third
# node (--cached-prefill-* where P_PREFIX_CACHING=on):
#
#   python multiturn.py --modes push --model Qwen --token-range 1000 100000 \
#     --prefill-url http://10.0.0.1:8100 --prefill-side-channel 10.0.0.1:5600 \
#     --prefill-tp-size 8 \
#     --decode-url http://10.0.0.2:8200 --decode-side-channel 10.0.0.2:5600 \
#     --turns 12 --first-tokens 2048 --user-tokens 1872 --answer-tokens 128

set -euo pipefail

die() {
  echo "serve_multiturn_p5en.sh: $*" >&2
  exit 2
}

HOST_IP=${HOST_IP:-}
ROLE=${ROLE:-}
MODE=${MODE:-push}
MODEL=${MODEL:-Qwen/Qwen3-32B}
P_PREFIX_CACHING=${P_PREFIX_CACHING:-off}
[[ -n $HOST_IP ]] || die "HOST_IP is not set; give this node's address"

case $MODE in
  push) connector=NixlPushConnector ;;
  pull) connector=NixlConnector ;;
  *) die "MODE is '$MODE', expected push or pull" ;;
esac

case $MODEL in
  Qwen/Qwen3-32B) served=Qwen dtype=bfloat16 ;;
  # Its weights are FP8; the rest follows the model's own configuration.
  zai-org/GLM-5-FP8) served=GLM dtype=auto ;;
  *) die "MODEL is '$MODEL', expected Qwen/Qwen3-32B or zai-org/GLM-5-FP8" ;;
esac

case $ROLE in
  prefill) port=8100 kv_role=kv_producer ;;
  decode) port=8200 kv_role=kv_consumer ;;
  *) die "ROLE is '$ROLE', expected prefill or decode" ;;
esac

caching=(--enable-prefix-caching)
case $ROLE-$P_PREFIX_CACHING in
  prefill-off) caching=(--no-enable-prefix-caching) ;;
  *-on | decode-off) ;;
  *) die "P_PREFIX_CACHING is '$P_PREFIX_CACHING', expected on or off" ;;
esac

transfer=$(
  cat <<JSON
{"kv_connector": "$connector", "kv_role": "$kv_role",
 "kv_buffer_device": "cuda", "engine_id": "$ROLE-engine-001",
 "kv_connector_extra_config": {"backends": ["LIBFABRIC"],
  "bidirectional_kv_xfer": true, "kv_recompute_threshold": 64,
  "decoder_kv_blocks_ttl": 480}}
JSON
)
transfer=${transfer//$'\n'/}

command=(
  vllm serve "$MODEL"
  --served-model-name "$served"
  --host 0.0.0.0 --port "$port"
  --dtype "$dtype"
  --tensor-parallel-size 8
  --max-model-len 32768
  --max-num-seqs 8
  "${caching[@]}"
  --enable-prompt-tokens-details
  --enable-per-request-metrics
  --kv-transfer-config "$transfer"
)

export VLLM_NIXL_SIDE_CHANNEL_HOST=$HOST_IP VLLM_NIXL_SIDE_CHANNEL_PORT=5600
# Offers /reset_prefix_cache, for equal prompts in all settings.
export VLLM_SERVER_DEV_MODE=1

if [[ ${DRY_RUN:-} == 1 ]]; then
  printf '%q ' "${command[@]}"
  echo
  exit
fi
exec "${command[@]}"
