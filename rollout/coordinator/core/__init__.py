"""The coordinator's decisions, without socket, clock or thread: messages in, messages out."""
