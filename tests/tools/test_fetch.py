# SPDX-License-Identifier: Apache-2.0
import shutil
from pathlib import Path

import pytest

from fake_fork import FakeFork
from fork_build.errors import BuildError
from fork_build.fetch import cache_directory


def nothing_laid(fork: FakeFork) -> bool:
    own = "vllm/distributed/kv_transfer/kv_connector/v1/nixl/__init__.py"
    return list(fork.tree()) == [own] and not (fork.root / ".base").exists()


def test_download_is_verified_and_kept(fork: FakeFork) -> None:
    archive = fork.build().archive()
    assert archive.parent == fork.cache
    assert list(fork.cache.iterdir()) == [archive]
    shutil.rmtree(fork.index)
    assert fork.build().archive() == archive


def test_wrong_hash_is_deleted_and_refused(fork: FakeFork) -> None:
    wheel = next(fork.index.glob("*.whl"))
    fork.pin(wheel, sha256="0" * 64)
    with pytest.raises(BuildError, match=r"0{64} is pinned.*deleted.*retry"):
        fork.build().lay()
    assert list(fork.cache.iterdir()) == []
    assert nothing_laid(fork)


def test_spoilt_cache_is_fetched_again(fork: FakeFork) -> None:
    archive = fork.build().archive()
    good = archive.read_bytes()
    archive.write_bytes(good[: len(good) // 2])
    assert fork.build().archive().read_bytes() == good


def test_spoilt_cache_without_network_is_not_used(fork: FakeFork) -> None:
    archive = fork.build().archive()
    archive.write_bytes(b"half of it")
    shutil.rmtree(fork.index)
    with pytest.raises(BuildError, match="could not download"):
        fork.build().lay()
    assert not archive.exists()
    assert nothing_laid(fork)


@pytest.mark.parametrize("kept", [0.0, 0.5])
def test_failed_or_cut_download_leaves_nothing(fork: FakeFork, kept: float) -> None:
    wheel = next(fork.index.glob("*.whl"))
    content = wheel.read_bytes()
    wheel.unlink()
    if kept:
        wheel.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(BuildError, match="retry with `make install`"):
        fork.build().lay()
    assert list(fork.cache.iterdir()) == []
    assert nothing_laid(fork)
    wheel.write_bytes(content)
    assert fork.build().lay()


def test_other_file_than_pinned_is_refused(fork: FakeFork) -> None:
    wheel = next(fork.index.glob("*.whl"))
    wheel.rename(wheel.with_name(wheel.name.replace("_2_17_", "_2_12_")))
    with pytest.raises(BuildError, match=r"_2_12_.*_2_17_.* is pinned"):
        fork.build().archive()
    assert list(fork.cache.iterdir()) == []


def test_unusable_cache_folder_is_named(fork: FakeFork) -> None:
    fork.cache.write_text("a file")
    with pytest.raises(BuildError, match="KVFORK_CACHE_DIR"):
        fork.build().archive()


def test_cache_directory_order(tmp_path: Path) -> None:
    shared = {"XDG_CACHE_HOME": str(tmp_path)}
    assert cache_directory(shared) == tmp_path / "vllm-kv-fork"
    chosen = {**shared, "KVFORK_CACHE_DIR": "~/wheels"}
    assert cache_directory(chosen) == Path.home() / "wheels"
    assert cache_directory({}) == Path.home() / ".cache" / "vllm-kv-fork"
