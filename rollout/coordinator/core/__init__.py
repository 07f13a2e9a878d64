"""The coordinator without a socket: messages in, messages out; one desk for each concern."""
