"""The page to watch at `/`: engines, throughput, staleness and the latest samples, live."""
