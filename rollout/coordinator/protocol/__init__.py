"""The wire protocol: messages and their encoding (docs/protocol.md)."""
