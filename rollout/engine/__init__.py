"""The only place that knows brain and muscle: requests in, steps, records out."""
