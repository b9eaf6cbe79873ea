"""`shoal bench`: measurements that anyone can repeat, each in one shape (report.py), beside a peer in the same run.

    report, table, machine, stats     what was measured, how it is shown, on what, and the arithmetic
    load, generator, target           closed and open loops against any OpenAI URL or Shoal's gRPC
    gateway, peers, cold              meshes of their own, and what they are measured beside

Nothing here is imported by a service.
"""
