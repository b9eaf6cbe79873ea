"""What every Shoal service shares: settings, telemetry, server and client plumbing, errors, block keys.

Imports no service. Services import each other only through this package and the contract (`shoal`).
"""
