"""Real vLLM servers on CPUs: their installation, their model, and requests to them."""
