"""Kernels for the CPU, in C++ (cpu/), and what Python needs to build, load and call them.

Each stands beside a torch reference: gpu_worker/models/llama.py computes the same, slower and on any device.
"""
