# SPDX-License-Identifier: Apache-2.0
"""Builds the distribution from the pinned base wheel and this repository's files.

Standard library only: `setup.py` imports it inside pip's isolated build
environment, and the Makefile runs it before the virtual environment exists.
"""
