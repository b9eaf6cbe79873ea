"""What a benchmark asks of an engine without a mesh around it: `python -m gpu_worker.measure TASK`.

    __main__     the tasks' protocol: settings from SHOAL_WORKER_*, JSON lines in and out
    logits       logits of given tokens at all positions, whichever runner computes them
    perplexity   how well they predict a text
    steps        how long decode steps take, by batch and by context
    limits       what this machine's memory and int8 units give
    agreement    vLLM's test of two greedy runs whose arithmetic differs

Nothing here is imported by the worker.
"""
