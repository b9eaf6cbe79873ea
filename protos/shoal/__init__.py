"""The contract of the mesh (one sub-package per service) and a thin client that needs only grpcio and protobuf."""
