"""Typed clients of the mesh's services: they turn protobuf into plain frozen values, so that callers see no stub."""
