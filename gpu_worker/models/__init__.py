"""Models in plain torch: read a checkpoint, build the decoder it names, run packed batches over paged KV."""
