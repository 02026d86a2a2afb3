# SPDX-License-Identifier: Apache-2.0
"""The hand-off protocol as pure state machines.

Nothing here does I/O, starts a thread or reads a clock: each call is told the
time and returns the actions that its caller must perform.
"""
