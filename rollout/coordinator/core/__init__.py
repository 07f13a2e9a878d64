"""The coordinator without a socket: messages in, messages out; one owner for each concern."""
