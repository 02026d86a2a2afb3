# SPDX-License-Identifier: Apache-2.0
"""What a router in front of prefill and decode engines owes them and its clients."""
