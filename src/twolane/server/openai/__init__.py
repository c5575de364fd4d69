"""OpenAI's endpoints: request bodies, answers and their schemas."""
