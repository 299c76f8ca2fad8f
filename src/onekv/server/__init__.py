"""HTTP: OpenAI's API and what it lacks, on one engine. The only room that knows FastAPI."""
