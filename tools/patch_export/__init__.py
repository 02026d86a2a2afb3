# SPDX-License-Identifier: Apache-2.0
"""Lays this repository's files over upstream's tree as commits for a pull request."""
