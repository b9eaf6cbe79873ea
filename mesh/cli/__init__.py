"""The `shoal` command. One module per command; each keeps its imports light so that `shoal --help` is instant."""
