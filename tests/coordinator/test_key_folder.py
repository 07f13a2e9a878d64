"""create_key_folder: the files of each peer, and the peers that may connect with them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollout.coordinator.net.key_folder import (
    CLIENT,
    ENGINE,
    coordinator_keys,
    create_key_folder,
    peer_keys,
)
from rollout.errors import ConfigError
from tests.coordinator.test_security import fault_of, peer, received_by, router


def test_a_peers_folder_alone_is_all_that_its_hosts_need(tmp_path: Path) -> None:
    create_key_folder(tmp_path / "keys")
    (tmp_path / "keys" / ENGINE).rename(tmp_path / "elsewhere")
    assert sorted(os.listdir(tmp_path / "elsewhere")) == [
        "coordinator.key",
        "own.key",
        "own.key_secret",
    ]
    with (
        router("127.0.0.1", curve=coordinator_keys(tmp_path / "keys")) as made,
        peer(made.address, peer_keys(tmp_path / "elsewhere", ENGINE)),
    ):
        assert received_by(made) == [b"hello"]


def test_only_their_owner_can_read_the_keys(tmp_path: Path) -> None:
    create_key_folder(tmp_path / "keys")
    secrets = list((tmp_path / "keys").rglob("*.key_secret"))
    assert len(secrets) == 3
    assert {path.stat().st_mode & 0o777 for path in secrets} == {0o600}
    folders = [tmp_path / "keys", *(tmp_path / "keys" / name for name in (ENGINE, CLIENT))]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}


def test_a_peer_is_let_in_and_kept_out_while_the_coordinator_runs(tmp_path: Path) -> None:
    create_key_folder(tmp_path, [ENGINE])
    with router("127.0.0.1", curve=coordinator_keys(tmp_path)) as made:
        create_key_folder(tmp_path, ["later"])
        with peer(made.address, peer_keys(tmp_path, "later")):
            assert received_by(made) == [b"hello"]
        (tmp_path / "allowed" / f"{ENGINE}.key").unlink()
        with peer(made.address, peer_keys(tmp_path, ENGINE)) as removed:
            assert "allow-list" in str(fault_of(removed))
        assert made.refusals.num_unknown_keys == 1


def test_allow_list_ignores_a_malformed_file(tmp_path: Path) -> None:
    create_key_folder(tmp_path, [ENGINE])
    (tmp_path / "allowed" / "a.key").write_bytes(b"\xff")
    with (
        router("127.0.0.1", curve=coordinator_keys(tmp_path)) as made,
        peer(made.address, peer_keys(tmp_path, ENGINE)),
    ):
        assert received_by(made) == [b"hello"]


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", "coordinator", "allowed"])
def test_a_peer_needs_a_name_that_is_a_folder_of_its_own(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be called"):
        create_key_folder(tmp_path / "keys", [ENGINE, name])
    assert not (tmp_path / "keys").exists(), "nothing is made"


def test_keys_are_made_once(tmp_path: Path) -> None:
    create_key_folder(tmp_path, [ENGINE])
    before = peer_keys(tmp_path, ENGINE)
    with pytest.raises(ConfigError, match="'engine' has keys"):
        create_key_folder(tmp_path, ["new", ENGINE])
    assert peer_keys(tmp_path, ENGINE) == before
    with pytest.raises(ConfigError, match=r"no keys of 'new', only of: engine"):
        peer_keys(tmp_path, "new")
    create_key_folder(tmp_path, ["new"])
    assert peer_keys(tmp_path, "new").server_public == before.server_public


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        create_key_folder(tmp_path / "file" / "keys")
