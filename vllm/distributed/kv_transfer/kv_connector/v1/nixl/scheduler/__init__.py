# SPDX-License-Identifier: Apache-2.0
"""The connector's role in the scheduler process: who owns which blocks, and why."""
