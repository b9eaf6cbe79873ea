"""A peer that cannot be installed is told with pip's last words, and whether it took too long."""

import pytest

from mesh.bench import peer_venv
from mesh.bench.peer_venv import PeerVenv
from mesh.bench.report import CannotMeasure


@pytest.fixture
def peer(monkeypatch, tmp_path):
    """One whose pip is not pip: it says something, and then fails or hangs as its first argument says."""
    monkeypatch.setattr(peer_venv, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(peer_venv, "LOOK_EVERY_S", 0.02)
    venv = PeerVenv("peer", "peer==1")
    venv.python.parent.mkdir(parents=True)
    venv.python.write_text('#!/bin/sh\necho "last words"\n[ "$3" = hang ] && exec sleep 60\nexit 1\n')
    venv.python.chmod(0o755)
    return venv


@pytest.mark.parametrize(
    ("how", "timeout_s", "told"), [("fail", 30.0, "installed: last"), ("hang", 1.0, "within 1 s: last")]
)
def test_what_went_wrong_is_told(peer, monkeypatch, how, timeout_s, told):
    monkeypatch.setattr(peer_venv, "INSTALL_TIMEOUT_S", timeout_s)
    with peer_venv.bar("installing", None) as shown, pytest.raises(CannotMeasure, match=f"{told} words"):
        peer.pip(shown, how)
