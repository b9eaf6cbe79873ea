"""Cold KV over Redis: bundles of blocks that any worker may store and any other may start from."""
