"""The HTTP schema: OpenAI's, with vLLM's names for what OpenAI has no field for."""
