# SPDX-License-Identifier: Apache-2.0
"""Says what another version of the base would ask of our code, not installed."""
