# SPDX-License-Identifier: Apache-2.0
"""The exception that the export reports without a traceback."""


class ExportError(Exception):
    """The export cannot go on; the message names the cause and what to do."""
