"""The bridge: an inference engine's KV blocks to chunk files and back. Cheap to import."""
