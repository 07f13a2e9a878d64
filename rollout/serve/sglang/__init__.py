"""SGLang's routes for trainers, and its /generate."""
