"""The gRPC API: InferenceService."""
