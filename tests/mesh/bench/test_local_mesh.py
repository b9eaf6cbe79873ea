"""What a benchmark's mesh shares with the user's own home, and what not."""

from mesh.bench import local_mesh
from mesh.models import ModelFolder


def test_a_mesh_finds_the_model_and_builds_kernels_where_the_next_one_looks(monkeypatch, tmp_path):
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "own"))
    model, home = tmp_path / "m", tmp_path / "mesh"
    model.mkdir()
    home.mkdir()
    (model / "tokenizer.json").write_text("{}")
    local_mesh._share(home, ModelFolder("m", model))
    assert (home / "models" / "m" / "tokenizer.json").is_file()
    (home / "kernels" / "built.so").write_text("")
    assert (tmp_path / "own" / "kernels" / "built.so").is_file()
    assert sorted(path.name for path in home.iterdir()) == ["kernels", "models"]
