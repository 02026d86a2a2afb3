# SPDX-License-Identifier: Apache-2.0
"""Stands in for setuptools while pip downloads a source distribution.

pip asks the build backend for the metadata of every source distribution that it
downloads. The real one would need the project's build requirements, torch among them.
"""
