"""Programs that compare the engine with other engines and with physical lower bounds."""
