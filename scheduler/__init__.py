"""Who runs where, and when: the queue, placement and leases of the mesh. Never sees a token."""
