"""gpu_worker: tokens for token ids. Owns the weights, the KV pool and the steps; knows no text, tenant quota or queue."""
