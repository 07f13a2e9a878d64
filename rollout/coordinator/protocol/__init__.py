"""The wire protocol of a fleet: messages and their encoding (docs/protocol.md)."""
