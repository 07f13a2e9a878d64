"""The wire protocol: messages, their bytes, and what a peer may send (docs/protocol.md)."""
