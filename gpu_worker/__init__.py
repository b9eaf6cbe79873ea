"""gpu_worker: tokens for token ids. Owns weights, KV pool and steps; knows no text, quota or queue."""
