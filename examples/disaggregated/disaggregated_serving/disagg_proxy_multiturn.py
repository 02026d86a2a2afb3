# SPDX-License-Identifier: Apache-2.0
"""Router for conversations: later turns go on from the decode engine's KV cache.

    python disagg_proxy_multiturn.py --mode push --port 8000 \
        --prefill 127.0.0.1:8100 --prefill-side-channel-port 5600 \
        --decode 127.0.0.1:8200 --decode-side-channel 127.0.0.1:5601

The engines need ``"bidirectional_kv_xfer": true`` in their
``kv_connector_extra_config``. A request names its conversation by
``conversation_id`` in the body or by the header ``X-Conversation-Id``.
"""

import sys

from pd_router.server import main_multiturn

if __name__ == "__main__":
    sys.exit(main_multiturn())
