"""Typed clients of the mesh's services: they alone touch stubs, and turn protobuf into plain frozen dataclasses."""
