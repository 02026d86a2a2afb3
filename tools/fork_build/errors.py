# SPDX-License-Identifier: Apache-2.0
"""The one exception that the build reports to people without a traceback."""


class BuildError(Exception):
    """The build cannot go on; the message names the cause and what to do."""
