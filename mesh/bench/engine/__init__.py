"""`shoal bench engine`: what one worker's engine promises, a section for each promise.

plan           what is measured, and what a section gives
interference   running streams while a long prompt enters
static         continuous batching beside the naive baseline, and static_rows, what comes of it
perplexity     what int8 and int4 cost in quality
start          from a process to its first token
curves, chart  how a step's time grows, with the machine's limits, and its drawing
precision      throughput by precision, which the default is chosen by
run            the sections that were asked for, one report
"""
