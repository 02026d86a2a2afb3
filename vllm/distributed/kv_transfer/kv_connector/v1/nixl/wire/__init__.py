# SPDX-License-Identifier: Apache-2.0
"""What engines say to each other, as values and as bytes.

Every message is a tagged msgpack array. Ranks send each other notifications through
NIXL, and anybody asks an engine questions on its side channel.
"""
