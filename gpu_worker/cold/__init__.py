"""The worker's side of the tier of KV that all workers share: what is fetched from it, and what is stored there."""
