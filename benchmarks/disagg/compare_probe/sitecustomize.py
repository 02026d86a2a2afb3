# SPDX-License-Identifier: Apache-2.0
"""Python imports this at start-up from PYTHONPATH; engines get the probe by it."""

import os

from engine_probe import (  # type: ignore[import-not-found]
    FOLDER_VARIABLE,
    install,
)

if os.environ.get(FOLDER_VARIABLE):
    install(os.environ)
