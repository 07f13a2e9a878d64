"""Which tokens run next. No torch, no clock."""
