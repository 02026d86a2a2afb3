# SPDX-License-Identifier: Apache-2.0
"""Router for push hand-off (``NixlPushConnector``).

    python disagg_proxy_pushconnector_demo.py --port 8000 \
        --prefill 127.0.0.1:8100 --prefill-side-channel-port 5600 \
        --decode 127.0.0.1:8200

Both legs go out together; prefill writes into decode's KV cache.
"""

import sys

from pd_router.config import Mode
from pd_router.server import main

if __name__ == "__main__":
    sys.exit(main(Mode.PUSH))
