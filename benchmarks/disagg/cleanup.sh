#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Ends what serve_pd.sh and run_sweep.sh started on this machine, and nothing else.
#
#   ./cleanup.sh server    the engines
#   ./cleanup.sh proxy     the proxy
#   ./cleanup.sh list      ends nothing, says what there is
#
# A process is ended only if its id, its time of start and the machine's boot are those
# that were written down when it was started.

set -euo pipefail
# shellcheck source=benchmarks/disagg/kit_env.sh disable=SC1091
source "$(dirname "${BASH_SOURCE[0]}")/kit_env.sh"

what=${1:-}
(($# <= 1)) || die "got $# arguments, expected one"
one_of "the argument" "$what" server proxy list
if [[ $what == list ]]; then
  exec "$PYTHON" "$KIT_DIR/kit_processes.py" list --state-dir "$STATE_DIR"
fi
exec "$PYTHON" "$KIT_DIR/kit_processes.py" stop --state-dir "$STATE_DIR" --kind "$what"
