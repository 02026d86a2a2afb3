# SPDX-License-Identifier: Apache-2.0
"""Router for pull hand-off (``NixlConnector``).

    python disagg_proxy_demo.py --port 8000 \
        --prefill 127.0.0.1:8100 --decode 127.0.0.1:8200

Prefill runs first; decode is chosen afterwards and reads the KV cache.
"""

import sys

from pd_router.config import Mode
from pd_router.server import main

if __name__ == "__main__":
    sys.exit(main(Mode.PULL))
