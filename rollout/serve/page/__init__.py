"""The page at `/`, which shows engines, throughput, staleness and the latest samples."""
