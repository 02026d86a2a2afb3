# SPDX-License-Identifier: Apache-2.0
"""The connector's role in each worker process."""
