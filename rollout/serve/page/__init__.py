"""The page at `/`: engines, throughput, staleness and the latest samples, live."""
