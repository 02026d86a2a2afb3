# SPDX-License-Identifier: Apache-2.0
"""Router in front of prefill and decode engines that hand KV caches over."""
