# SPDX-License-Identifier: Apache-2.0
"""A build backend that knows metadata only: it gives out the archive's `PKG-INFO`."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from email.parser import Parser
from pathlib import Path


def get_requires_for_build_wheel(
    config_settings: Mapping[str, object] | None = None,
) -> list[str]:
    """Nothing is needed."""
    return []


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: Mapping[str, object] | None = None
) -> str:
    """Copy the metadata of the unpacked archive, in which pip calls this."""
    source = Path("PKG-INFO")
    headers = Parser().parsestr(source.read_text(encoding="utf-8"), headersonly=True)
    name = f"{headers['Name'].replace('-', '_')}-{headers['Version']}.dist-info"
    folder = Path(metadata_directory) / name
    folder.mkdir()
    shutil.copy(source, folder / "METADATA")
    return name
