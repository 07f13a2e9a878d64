"""Programs that measure the engine beside other engines and beside physical lower bounds."""
