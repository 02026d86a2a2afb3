# SPDX-License-Identifier: Apache-2.0
"""What is put into the engines under comparison; the folder goes on PYTHONPATH."""
